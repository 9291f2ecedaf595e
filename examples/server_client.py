"""Start a server, ask it as any OpenAI client does, stop it.

    python examples/server_client.py [MODEL_DIR]

It needs ``pip install "fastdecode[sworker,server]" openai``.
"""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from openai import OpenAI

MODEL = sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).parent / "model" / "checkpoint")
SERVE = [sys.executable, "-m", "fastdecode", "serve", MODEL, "--port", "0"]


@contextlib.contextmanager
def server() -> Iterator[str]:
    """The URL of a server that ends with this block."""
    process = subprocess.Popen(SERVE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "listening at" in line:
                yield line.split("listening at ")[1].split()[0].rstrip(";")
                break
        else:
            raise RuntimeError("the server ended before it listened")
    finally:
        process.terminate()  # it drains: open requests end first
        process.wait()


def main() -> None:
    with server() as url:
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=60)
        model = client.models.list().data[0].id
        print(f"model {model}:", end=" ", flush=True)
        chunks = client.completions.create(
            model=model, prompt="Once upon a time", max_tokens=40, temperature=0, stream=True
        )
        for chunk in chunks:
            print(chunk.choices[0].text, end="", flush=True)
        print()


if __name__ == "__main__":
    main()
