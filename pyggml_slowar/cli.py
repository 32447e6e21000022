"""The ``slowar`` command."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
import numpy.typing as npt
import psutil
from tqdm import tqdm

from . import __version__, bench, device
from .generation import FRAMES_PER_SECOND, Frame, Timings, generate
from .make_model import PRESETS, TYPES, make_model
from .model import Model
from .sampler import IM_END_ID
from .server import DeviceServer
from .session import Output, Session

_MIB = 2**20


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 1 after an error, 2 after a wrong command line."""
    options = _parser().parse_args(arguments)
    warnings.showwarning = _show_warning
    try:
        options.run(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("slowar: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output left (`| head`): nobody to tell, and the flush at exit must not
        # try again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        print(f"slowar: {_one_line(error)}", file=sys.stderr)
        return 1
    return 0


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"slowar: warning: {message}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slowar", description="The Slow-AR transformer of S2 Pro on ggml."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="versions, backends")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    info = commands.add_parser("info", help="what is in a GGUF file and where it is put")
    _add_model(info)
    info.add_argument("--json", action="store_true", help="machine-readable")
    info.set_defaults(run=_info)

    devices = commands.add_parser("devices", help="the devices that ggml found")
    _add_servers(devices)
    devices.add_argument("--json", action="store_true", help="machine-readable")
    devices.set_defaults(run=_devices)

    serve = commands.add_parser("serve-device", help="lend a device to models of other machines")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen at (default: this)")
    serve.add_argument("--port", type=int, default=50052, help="0: any that is free")
    serve.add_argument("--backend", default="auto", help="of the device lent: cpu, cuda, ...")
    serve.add_argument("--device", type=_indices, metavar="I", help="which of the backend's")
    serve.add_argument("--threads", type=_positive, help="CPU threads (default: what pays here)")
    serve.add_argument("--memory", type=_positive, metavar="MiB", help="at most so much")
    serve.add_argument("--max-buffer", type=_positive, metavar="MiB", help="of one allocation")
    serve.set_defaults(run=_serve_device)

    make = commands.add_parser("make-model", help="write a random model in the real file layout")
    make.add_argument("out", type=Path, metavar="OUT")
    make.add_argument("--preset", choices=PRESETS, default="tiny", help="size (default: tiny)")
    make.add_argument(
        "--type", choices=TYPES, default="q8_0", help="of the matrices (default: q8_0)"
    )
    make.add_argument(
        "--fast-type", choices=TYPES, help="of the Fast-AR's matrices (default: as --type)"
    )
    make.add_argument("--seed", type=int, default=0)
    make.set_defaults(run=_make_model)

    evaluate = commands.add_parser("eval", help="evaluate a prompt and, one by one, further frames")
    _add_model(evaluate)
    _add_session(evaluate)
    evaluate.add_argument("prompt", type=Path, metavar="PROMPT.npy", help="integers (11, n)")
    evaluate.add_argument("--steps", type=Path, metavar="FRAMES.npy", help="integers (11, m)")
    evaluate.add_argument("--out", type=Path, required=True, metavar="OUT.npz")
    evaluate.add_argument("--chunk", type=int, help="positions per evaluation of the prompt")
    evaluate.add_argument("--threads", type=int, help="CPU threads (default: what pays here)")
    evaluate.set_defaults(run=_eval)

    codes = commands.add_parser("generate", help="from a prompt to codes")
    _add_model(codes)
    codes.add_argument("prompt", type=Path, metavar="PROMPT.npy", help="integers (11, n)")
    codes.add_argument("--out", type=Path, required=True, metavar="CODES.npy")
    codes.add_argument("--max-frames", type=_positive, default=1024, help="(default: 1024)")
    codes.add_argument("--min-frames", type=int, default=0)
    codes.add_argument("--temperature", type=float, default=0.8)
    codes.add_argument("--top-p", type=float, default=0.8)
    codes.add_argument("--top-k", type=int, default=30)
    codes.add_argument("--seed", type=int, help="0 to 2^64 - 1 (default: any, which is told)")
    codes.add_argument("--im-end-id", type=int, default=IM_END_ID, help="the end token")
    codes.add_argument("--kv-type", default="f16", help="of the cache: f16, bf16, f32 or q8_0")
    codes.add_argument("--threads", type=int, help="CPU threads (default: what pays here)")
    codes.set_defaults(run=_generate)

    measure = commands.add_parser("bench", help="how fast, and how near to what the memory allows")
    measure.add_argument("model", type=Path, metavar="MODEL", help="a GGUF file")
    measure.add_argument("--attention", type=_words, default="reference,flash", metavar="A,B")
    measure.add_argument("--logits", type=_words, default="semantic", metavar="A,B")
    measure.add_argument("--repack", choices=("off", "on", "both"), default="off")
    measure.add_argument("--past", type=_numbers, default="128,640", metavar="N,M")
    measure.add_argument("--prefill", type=_numbers, default="128,512", metavar="N,M")
    measure.add_argument(
        "--batch", type=_numbers, default=(), metavar="N,M", help="sessions a step"
    )
    measure.add_argument("--repeats", type=_positive, default=7, help="steps timed (default: 7)")
    measure.add_argument("--threads", type=_positive, help="CPU threads (default: what pays here)")
    measure.add_argument("--frames", action="store_true", help="whole frames of a generation, too")
    measure.add_argument("--contended", action="store_true", help="again, beside a busy process")
    measure.add_argument("--json", action="store_true", help="machine-readable")
    measure.set_defaults(run=_bench)
    return parser


class _Version(argparse.Action):
    """Looks at the backends only when it is asked."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        print(f"pyggml-slowar {__version__}, {device.build_info()}")
        parser.exit()


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(_positive(word) for word in text.split(","))


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL", help="a GGUF file")
    parser.add_argument(
        "--backend", default="auto", help="auto, cpu, cuda, metal, vulkan, rpc, ..."
    )
    parser.add_argument(
        "--device", type=_indices, metavar="I,J", help="which of the backend's (default: the first)"
    )
    parser.add_argument(
        "--n-gpu-layers", type=int, default=-1, help="layers on the devices (default: all)"
    )
    _add_servers(parser)
    parser.add_argument(
        "--place",
        type=_rule,
        action="append",
        default=[],
        metavar="PATTERN=DEVICE",
        help="tensors of such names there; several times",
    )
    parser.add_argument(
        "--repack", action="store_true", help="rearrange layer matrices for the CPU: a copy"
    )
    parser.add_argument(
        "--no-mmap", action="store_true", help="read the weights instead of mapping"
    )


def _add_servers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--servers", type=_words, default=(), metavar="HOST:PORT,...", help="device servers"
    )


def _indices(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def _rule(text: str) -> tuple[str, str]:
    pattern, equals, place = text.rpartition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not PATTERN=DEVICE")
    return pattern, place


def _add_session(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--attention", default="auto", help="auto, flash, reference or ggml")
    parser.add_argument("--kv-type", default="f16", help="of the cache: f16, bf16, f32 or q8_0")
    parser.add_argument("--logits", default="full", help="full, semantic or none")


def _open(options: argparse.Namespace, *, load: bool = True) -> Model:
    return Model(
        options.model,
        backend=options.backend,
        device=options.device,
        n_gpu_layers=options.n_gpu_layers,
        servers=options.servers,
        tensor_placement=dict(options.place),
        mmap=not options.no_mmap,
        repack=options.repack,
        load=load,
    )


def _session(model: Model, options: argparse.Namespace) -> Session:
    return model.session(
        n_threads=options.threads,
        attention=options.attention,
        kv_type=options.kv_type,
        logits=options.logits,
    )


def _info(options: argparse.Namespace) -> None:
    with _open(options, load=False) as model:
        tensors = model.tensors()
        placement = model.placement()
        c = model.config
        position = 2 * 2 * c.n_layer * c.n_head_kv * c.head_dim  # K and V, two bytes each
        types: Counter[str] = Counter()
        places: Counter[str] = Counter()
        for t in tensors:
            types[t.type] += t.nbytes
            places[t.where] += t.nbytes
        facts = {
            "file": str(options.model),
            "file_bytes": options.model.stat().st_size,
            "parameters": model.n_params,
            "weight_bytes": model.nbytes,
            "weight_bytes_by_type": dict(types),
            "weight_bytes_by_place": dict(places),
            "kv_cache_bytes_per_position": position,
            "device": model.device.name,
            "placement": [asdict(p) for p in placement],
            "n_gpu_layers": model.n_gpu_layers,
            "build": device.build_info(),
            "config": asdict(c),
        }
    if options.json:
        print(json.dumps(facts, indent=2))
        return
    at_most = position * c.n_ctx / _MIB
    print(f"{options.model}: {model.n_params / 1e6:.1f} M parameters, {len(tensors)} tensors")
    print(f"  weights    {model.nbytes / _MIB:.1f} MiB ({_shares(types)}; {_shares(places)})")
    print(f"  KV cache   {position} bytes a position, {at_most:.0f} MiB for {c.n_ctx}")
    print(f"  device     {', '.join(map(_named, model.devices))}, {model.n_gpu_layers} GPU layers")
    for p in placement:
        note = f" ({p.note})" if p.note else ""
        print(f"    {p.what:14} {p.device:10} {p.nbytes / _MIB:10.1f} MiB{note}")
    print(f"  build      {device.build_info()}")
    for key, value in asdict(c).items():
        print(f"  {key:26} {value}")


def _named(d: device.Device) -> str:
    return f"{d.backend.lower()} {d.index} ({d.description})"


def _shares(bytes_of: Counter[str]) -> str:
    return ", ".join(f"{name} {n / _MIB:.1f}" for name, n in bytes_of.most_common())


def _devices(options: argparse.Namespace) -> None:
    found = device.devices(options.servers)
    if options.json:
        print(json.dumps([asdict(d) for d in found], indent=2))
        return
    for d in found:
        free, total = d.memory_free / _MIB, d.memory_total / _MIB
        print(f"{_named(d)}: {d.type}, {free:.0f} of {total:.0f} MiB free")
    print(f"default threads: {device.default_threads()}")
    print(device.build_info())


def _serve_device(options: argparse.Namespace) -> None:
    server = DeviceServer(
        options.host,
        options.port,
        backend=options.backend,
        device=options.device,
        n_threads=options.threads,
        memory=options.memory and options.memory * _MIB,
        max_buffer=options.max_buffer and options.max_buffer * _MIB,
    )
    print(f"serving {_named(server.device)} at {server.host}:{server.port}", flush=True)
    # ggml's server writes lines of its own.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    try:
        server.run()
    except KeyboardInterrupt:
        os._exit(130)  # the thread that serves is inside a call that does not end


def _make_model(options: argparse.Namespace) -> None:
    with tqdm(desc="weights", unit="", unit_scale=True) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        make_model(
            options.out,
            PRESETS[options.preset],
            options.type,
            fast_type=options.fast_type,
            seed=options.seed,
            progress=progress,
        )
    print(f"{options.out}: {options.out.stat().st_size / _MIB:.1f} MiB")


@contextmanager
def _appearing_whole(path: Path) -> Iterator[BinaryIO]:
    """A file that is there once the block has ended well.

    Opened before the work, so that a wrong path costs nothing.
    """
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        try:
            yield file
            file.close()
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def _eval(options: argparse.Namespace) -> None:
    prompt = _load(options.prompt)
    frames = _load(options.steps) if options.steps else np.empty((len(prompt), 0), prompt.dtype)
    with _appearing_whole(options.out) as file:
        outputs = _run(options, prompt, frames)
        np.savez(
            file,
            hidden=np.stack([o.hidden for o in outputs]),
            logits=np.stack([o.logits for o in outputs]),
            ids=outputs[0].ids,
        )


class _Progress(ExitStack):
    """A bar for the prompt's positions, then one for the frames: how many there will be is open."""

    _prompt: tqdm[NoReturn] | None = None
    _frames: tqdm[NoReturn] | None = None

    def prefill(self, done: int, total: int) -> None:
        if self._prompt is None:
            self._prompt = self.enter_context(tqdm(total=total, desc="prefill", unit="tok"))
        self._prompt.update(done - self._prompt.n)
        if done == total:
            self._prompt.close()
            self._frames = self.enter_context(tqdm(desc="frames", unit="frame"))

    def frame(self, frame: Frame) -> None:
        assert self._frames is not None
        n = frame.number + 1
        audio = f"{n / FRAMES_PER_SECOND:.1f} s of audio"
        cost = f"real time {_real_time(frame.timings, n):.2f}, {_cost(frame.timings, n)}"
        self._frames.set_postfix_str(f"{audio}, {cost}", refresh=False)
        self._frames.update()


def _cost(timings: Timings, n_frames: int) -> str:
    parts = timings.slow_ar, timings.fast_ar, timings.sampling
    slow, fast, sampling = (seconds / n_frames * 1e3 for seconds in parts)
    return f"Slow-AR {slow:.1f}, Fast-AR {fast:.1f}, sampling {sampling:.1f} ms"


def _real_time(timings: Timings, n_frames: int) -> float:
    """Seconds spent on frames for each second of their audio."""
    seconds = timings.slow_ar + timings.fast_ar + timings.sampling
    return seconds / n_frames * FRAMES_PER_SECOND


def _generate(options: argparse.Namespace) -> None:
    prompt = _load(options.prompt)
    with (
        _appearing_whole(options.out) as file,
        _open(options) as model,
        _Progress() as progress,
    ):
        start = time.perf_counter()
        made = generate(
            model,
            prompt,
            max_frames=options.max_frames,
            min_frames=options.min_frames,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            seed=options.seed,
            im_end_id=options.im_end_id,
            on_frame=progress.frame,
            on_prefill=progress.prefill,
            on_interrupt="return",
            kv_type=options.kv_type,
            n_threads=options.threads,
        )
        seconds = time.perf_counter() - start
        np.save(file, made.codes)
    n = made.codes.shape[1]
    t = made.timings
    print(f"{options.out}: {n} frames, {n / FRAMES_PER_SECOND:.1f} s of audio, {made.finished}")
    print(f"seed       {made.seed}")
    print(f"time       {seconds:.1f} s, prefill {t.prefill:.1f} of them")
    if n:
        print(f"a frame    {_cost(t, n)}")
        print(
            f"real time  {_real_time(t, n):.2f} s for a second of audio, without prefill and codec"
        )


def _load(path: Path) -> npt.NDArray[Any]:
    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path}: not an array file that np.save wrote ({error})") from None
    if not isinstance(array, np.ndarray) or array.ndim != 2:
        raise ValueError(f"{path}: expected one array of shape (11, n)")
    return array


def _run(
    options: argparse.Namespace, prompt: npt.NDArray[Any], frames: npt.NDArray[Any]
) -> list[Output]:
    n_prompt, n_steps = prompt.shape[1], frames.shape[1]
    with _open(options) as model, _session(model, options) as session:
        session.init_kv_cache(max(1, n_prompt + n_steps))
        with tqdm(total=n_prompt, desc="prefill", unit="tok") as bar:
            start = time.perf_counter()
            outputs = [
                session.prefill(
                    prompt, chunk=options.chunk, progress=lambda done, _: bar.update(done - bar.n)
                )
            ]
            prefill_s = time.perf_counter() - start
        with tqdm(total=n_steps, desc="steps", unit="tok", disable=n_steps == 0) as bar:
            start = time.perf_counter()
            for frame in frames.T:
                outputs.append(session.step(frame))
                bar.set_postfix(position=session.n_past, refresh=False)
                bar.update()
            steps_s = time.perf_counter() - start
        print(f"prefill    {n_prompt} positions, {n_prompt / prefill_s:.1f} tok/s")
        if n_steps:
            ms = steps_s / n_steps * 1e3
            print(f"steps      {n_steps}, {ms:.2f} ms each, {n_steps / steps_s:.1f} tok/s")
        rss = psutil.Process().memory_info().rss
        how = f"{session.attention} attention, {session.n_threads} threads"
        print(f"position   {session.n_past} of {session.max_seq_len}, {how}")
        print(
            f"memory     weights {model.nbytes / _MIB:.1f}, KV cache {session.nbytes / _MIB:.1f}, "
            f"compute {session.compute_nbytes / _MIB:.1f}, RSS {rss / _MIB:.1f} MiB"
        )
    return outputs


def _bench(options: argparse.Namespace) -> None:
    plan = bench.Plan(
        model=options.model,
        attention=options.attention,
        logits=options.logits,
        repack={"off": (False,), "on": (True,), "both": (False, True)}[options.repack],
        past=sorted(options.past),
        prefill=options.prefill,
        batch=options.batch,
        n_threads=options.threads,
        repeats=options.repeats,
        contended=options.contended,
        frames=options.frames,
    )
    with tqdm(bar_format="{desc} [{elapsed}]") as bar:
        report = bench.run(plan, bar.set_description_str)
    print(json.dumps(report.as_dict(), indent=2) if options.json else bench.markdown(report))


if __name__ == "__main__":
    sys.exit(main())
