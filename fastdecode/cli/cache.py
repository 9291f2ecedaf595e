"""``fastdecode cache``: show, verify or clear conversations and KV blocks on disk."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdecode.cli.options import EXIT_NO, add_options
from fastdecode.core.config.options import REQUIRED, option, switch

if TYPE_CHECKING:
    from fastdecode.conversations.store import Contents
    from rworker.tiers.inspection import KeptBlocksOnDisk


@dataclass(frozen=True)
class CacheOptions:
    place: Path = option(REQUIRED, "the directory, or the file", flag="place", metavar="DIR")
    verify: bool = switch(
        "say only whether it is whole; exit code 1: it isn't, or is in use", is_alternative=True
    )
    clear: bool = switch(
        "end all of its conversations: the file is written over with zeros, and removed; or "
        "remove all KV blocks",
        is_alternative=True,
    )
    json: bool = switch("print it as JSON")


def add_cache(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Show what is kept of conversations in the directory of --conversations, or "
        "in the file that run-batch keeps beside its output; or what KV blocks R-workers keep in "
        "the directory of --cache-disk. Every turn is read and compared with its checksum (KV "
        "blocks with --verify only); nothing is changed."
    )
    parser.set_defaults(run=run_cache)
    add_options(parser, CacheOptions)


def run_cache(args: argparse.Namespace) -> int:
    from fastdecode.conversations.store import clear, file_of, inspect
    from rworker.tiers.disk import slot_files

    if args.place.is_dir() and slot_files(args.place):
        return _of_blocks(args)
    path = file_of(args.place)
    found = inspect(path)
    if args.clear:
        clear(path)
    if args.json:
        print(json.dumps({**asdict(found), "cleared": args.clear}))
    elif args.clear:
        print(f"{path}: {found.conversations} conversation(s) cleared")
    else:
        lines = _lines(found)
        print(*([f"{path}: {lines[-1]}"] if args.verify else lines), sep="\n")
    return EXIT_NO if not args.clear and (found.damage or (args.verify and found.is_held)) else 0


def _of_blocks(args: argparse.Namespace) -> int:
    from rworker.tiers.inspection import clear_blocks, inspect_blocks

    found = inspect_blocks(args.place, verify=args.verify)
    num_cleared, left = clear_blocks(args.place) if args.clear else (0, [])
    if args.json:
        told: dict[str, Any] = {"files": [asdict(each) for each in found], "cleared": args.clear}
        if args.clear:
            told["left"] = [str(path) for path in left]
        print(json.dumps(told))
    elif args.clear:
        print(f"{args.place}: {num_cleared} files of KV blocks removed")
        for path in left:
            print(f"{path} holds no KV blocks, and is left as it is: remove it yourself")
    else:
        for each in found:
            print("\n".join(_block_lines(each, was_verified=args.verify)))
    return EXIT_NO if any(each.damage for each in found) and not args.clear else 0


def _block_lines(found: KeptBlocksOnDisk, *, was_verified: bool) -> list[str]:
    """Return lines about an R-worker's file. ``was_verified``: all of it was read."""
    told = [
        f"{found.path}: {found.num_blocks} KV blocks of {found.num_slots}, "
        f"{found.num_bytes} bytes; model and heads {found.identity[:16]}"
    ]
    if found.is_held:
        told.append("an R-worker uses it")
    if was_verified and not found.damage:
        told.append("whole")
    return [*told, *(f"damaged: {what}" for what in found.damage)]


def _lines(found: Contents) -> list[str]:
    if found.is_held:
        about = (
            f"{found.path}: {found.num_bytes} bytes; a process uses it: try again once it has ended"
        )
        return [about, "not verified"]
    told = [
        f"{found.path}: {found.conversations} conversation(s), {found.turns} turn(s), "
        f"{found.tokens} tokens; {found.over} are over",
        f"{found.num_bytes} bytes; model and tokenizer {found.identity[:16]}",
    ]
    if found.last_active_s is not None:
        last = datetime.fromtimestamp(found.last_active_s).replace(microsecond=0)
        told.append(f"last turn {last.isoformat(sep=' ')}")
    return [*told, f"damaged, and not by a crash: {found.damage}" if found.damage else "whole"]
