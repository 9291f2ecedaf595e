"""Names of KV blocks."""

from __future__ import annotations

from fastdecode.core.model.block_keys import KEY_BYTES, block_keys, root_key


def test_a_key_says_all_tokens_up_to_its_blocks_end() -> None:
    root = root_key("a salt")
    whole = block_keys(root, range(12), 4)
    assert len(set(whole)) == 3 and {len(key) for key in whole} == {KEY_BYTES}
    assert block_keys(whole[0], range(4, 12), 4) == whole[1:], "made in pieces, or at once"
    other = block_keys(root, [9, *range(1, 12)], 4)
    assert not set(whole) & set(other), "one token of the first block differs"
    assert block_keys(root, range(11), 4) == whole[:2], "what is no full block has no key"
    assert block_keys(root, (), 4) == []


def test_roots_differ_by_salt_and_are_alike_in_every_process() -> None:
    assert root_key("abc").hex() == "cf4ab791c62b8d2b2109c90275287816"
    assert len({root_key(salt) for salt in ("", "a", "b", "\ud800")}) == 4
