"""A conversation whose KV cache is kept between turns, also across restarts.

    python examples/conversation.py [MODEL_DIR]

Each turn sends only what is new. The engine runs the new tokens and reuses the
rest; ``num_cached_tokens`` says how many it did not run again. The second LLM
goes on with the conversation from the files that the first one left.
"""

import sys
import tempfile
from pathlib import Path

from fastdecode import LLM, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).parent / "model" / "checkpoint")
PARAMS = SamplingParams(temperature=0, max_tokens=16, stop=["\n"])
TURNS = [
    "Mirorin: My best friend is Vinanan.\nFalivith: I live in Whitehill.\n"
    "Mirorin: Tell me again who my best friend is.\nFalivith:",
    "\nMirorin: Tell me again where you live.\nFalivith:",
    "\nMirorin: Do you remember who my best friend is?\nFalivith:",
]


def say(llm: LLM, turn: str) -> None:
    (output,) = llm.generate([turn], PARAMS, conversation_id="friends")
    print(f"{turn.strip()}{output.text}")
    print(f"  [{len(output.prompt_token_ids)} tokens so far, {output.num_cached_tokens} reused]")


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        with LLM(MODEL, conversations=directory, block_size=16) as llm:
            for turn in TURNS[:2]:
                say(llm, turn)
        print("-- a new process would go on like this --")
        with LLM(MODEL, conversations=directory, block_size=16) as llm:
            say(llm, TURNS[2])


if __name__ == "__main__":
    main()
