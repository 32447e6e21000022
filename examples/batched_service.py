"""A service: clients come at random, each reads its own stream, and all share every evaluation.

python examples/batched_service.py [MODEL.gguf]
"""

from __future__ import annotations

import asyncio
import random
import time

from _model import end_token, model_path, random_prompt

import pyggml_slowar as slowar

N_CLIENTS, MIN_FRAMES, MAX_FRAMES = 8, 20, 40
LEAVES = 2  # this client is gone after its tenth frame


async def serve(runner: slowar.BatchRunner, i: int, tenth: asyncio.Event) -> None:
    """One client from its coming to its last frame."""
    await asyncio.sleep(random.random() * 0.3)
    config = runner.model.config
    prompt = random_prompt(config, n_text=16 + 4 * i, n_semantic=0, seed=i)
    start, waited, n = time.perf_counter(), 0.0, 0
    while n == 0:
        try:
            async for frame in runner.stream(
                prompt,
                max_frames=MAX_FRAMES,
                min_frames=MIN_FRAMES,
                seed=i,
                im_end_id=end_token(config),
            ):
                # Here the frame's codes would be sent.
                n = frame.number + 1
                if n == 1:
                    waited = time.perf_counter() - start
                elif n == 10:
                    tenth.set()
        except slowar.QueueFullError:
            await asyncio.sleep(0.05)  # a web server would answer 503 instead
    print(f"client {i}   {n} frames, the first after {waited:.3f} s")


async def run(runner: slowar.BatchRunner) -> None:
    tenth = [asyncio.Event() for _ in range(N_CLIENTS)]
    tasks = [asyncio.create_task(serve(runner, i, tenth[i])) for i in range(N_CLIENTS)]
    waiting = asyncio.create_task(tenth[LEAVES].wait())
    await asyncio.wait({waiting, tasks[LEAVES]}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    tasks[LEAVES].cancel()  # as a server does when a connection is closed
    print(f"client {LEAVES}   left")
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result


def main() -> None:
    with model_path() as path, slowar.Model(path) as model:
        with slowar.BatchRunner(
            model, max_batch=4, max_queue=2, n_ctx=128, extra_ids=(end_token(model.config),)
        ) as runner:
            asyncio.run(run(runner))
        s = runner.stats
        print(f"requests   {s.finished} finished, {s.cancelled} cancelled, {s.failed} failed")
        print(f"work       {s.positions} positions in {s.evaluations} evaluations")


if __name__ == "__main__":
    main()
