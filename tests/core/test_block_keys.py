"""Names of KV blocks."""

from __future__ import annotations

from fastdecode.core.model.block_keys import KEY_BYTES, block_keys, root_key


def test_a_key_says_all_tokens_up_to_its_blocks_end() -> None:
    root = root_key("a model")
    whole = block_keys(root, range(12), 4)
    assert len(set(whole)) == 3 and {len(key) for key in whole} == {KEY_BYTES}
    assert block_keys(whole[0], range(4, 12), 4) == whole[1:], "made in pieces, or at once"
    other = block_keys(root, [9, *range(1, 12)], 4)
    assert not set(whole) & set(other), "one token of the first block differs"
    assert block_keys(root, range(11), 4) == whole[:2], "what is no full block has no key"
    assert block_keys(root, (), 4) == []


def test_roots_differ_by_model_and_salt_wherever_one_ends() -> None:
    roots = [root_key("ab", "c"), root_key("a", "bc"), root_key("abc"), root_key("", "abc")]
    assert len(set(roots)) == 4
    assert root_key("ab", "c") == roots[0], "in every process alike"
    assert roots[0].hex() == "873e9ea3d2c2455815354be805b8cd08"
