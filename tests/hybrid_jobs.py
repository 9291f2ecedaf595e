"""A job with KV on both sides in which it is certain who is where: some
sequences fit into the device's KV cache, and others never do."""

from __future__ import annotations

import json
from pathlib import Path

from generate_jobs import answers_alone, write_requests

MAX_TOKENS = 240
LENGTHS = (1, 6, 70, 60, 80, 90)
"""Of prompts. The first two are at home, the other four are away."""
_DEVICE_TOKENS = 256
_TOKEN_BYTES = 576  # of the tiny llama, in float32


class HybridJob:
    """``fastdecode generate`` of some requests, the first of which is done long
    before the others.

    Args:
        checkpoint: the tiny llama.
        directory: for its files.
    """

    def __init__(self, checkpoint: Path, directory: Path) -> None:
        self._source = directory / "in.jsonl"
        self.output = directory / "out.jsonl"
        self._summary = directory / "summary.json"
        write_requests(self._source, MAX_TOKENS, LENGTHS)
        self._model = ["--model", str(checkpoint), "--dtype", "float32", "--block-size", "16"]
        device_gb = _DEVICE_TOKENS * _TOKEN_BYTES / 1e9
        placement = ["--kv-placement", "hybrid", "--device-kv-gb", str(device_gb)]
        files = ["--input", str(self._source), "--output", str(self.output)]
        files += ["--summary", str(self._summary), "--worker-silence-s", "3"]
        self.options = ["generate", *self._model, *placement, *files]

    def check_with_one_lost(self) -> None:
        """All tokens are those of either side alone. Who was at the R-worker
        that was lost was recomputed, and nobody who was at home."""
        answered = self.output.read_text()
        assert answered == answers_alone(self._source, *self._model)
        assert answered == answers_alone(self._source, *self._model, "--kv-placement", "gpu")
        written = json.loads(self._summary.read_text())
        assert written["r_workers_lost"] == 1
        assert 0 < written["recomputed"] < len(LENGTHS) - 2, written
        assert set(written["hybrid_steps"]) & {"mixed", "split-1", "split-2"}, written
