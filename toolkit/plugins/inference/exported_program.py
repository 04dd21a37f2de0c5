"""`toolkit export`: a trained model as files that need no toolkit, in a new folder.

    model.safetensors    the weights, under the model's own names
    model.pt2            the whole computation, by torch.export: torch alone loads and runs it
    compiled.pt2         with --aot: the same, compiled to machine code by AOTInductor
    model.json           inputs, outputs, origin, the files' digests
    ...                  what the job adds (``Job.export_files``)

The program is the model in evaluation mode, in fp32, for the CPU and any number of samples
(https://docs.pytorch.org/docs/stable/export.html). Before it is handed over, it is loaded back and compared with the
model on real samples.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from toolkit import __version__
from toolkit.base import fsio, logs
from toolkit.base.errors import JobFailedError, RequestError
from toolkit.checkpoint.whole import export as export_weights
from toolkit.data.loader import eval_batches
from toolkit.plugins.inference.trained_model import Trained
from toolkit.ranks.batch import Share
from toolkit.strategies.objective import capture_model_inputs

WEIGHTS, PROGRAM, COMPILED, ABOUT = "model.safetensors", "model.pt2", "compiled.pt2", "model.json"
FORMATS = {"safetensors": (WEIGHTS,), "program": (PROGRAM,), "both": (WEIGHTS, PROGRAM)}
#: Real samples that a program is tried on: all of them, all but one, and one alone.
SAMPLES = 8
#: How much a loaded program may differ from the model, relative to the largest output: fp32 has seven digits.
TOLERANCE = 1e-5
#: The same for a compiled program, whose sums are in another order.
COMPILED_TOLERANCE = 1e-4

log = logs.get(__name__)


@dataclass(frozen=True)
class ExportCheck:
    """A program compared with its model: batch sizes, largest difference of an output, and bound."""

    batch_sizes: tuple[int, ...]
    largest_difference: float
    bound: float


def export(trained: Trained, target: Path, form: str, *, compiles: bool = False) -> dict[str, Any]:
    """Write the new folder ``target``; ``form`` is one of ``FORMATS``. Return the content of ``model.json``.

    ``compiles`` the program as well, for which this machine needs a C++ compiler.

    Raises FileExistsError where the folder exists, CheckpointError for damage, and JobFailedError where torch.export
    cannot take the model or its program differs from the model. With ``both`` the weights are written even then.
    """
    example: Tensor | None = None
    model = trained.model.cpu()  # also where there is a GPU: a program is bound to the device that it was made on
    trial: ExportCheck | None = None
    compiled: ExportCheck | None = None
    failure: JobFailedError | RequestError | None = None
    # The folder appears under its name only when it is complete.
    with fsio.atomic_path(target) as folder:
        fsio.make_dir(folder)
        if WEIGHTS in FORMATS[form]:
            path = folder / WEIGHTS
            export_weights(
                trained.checkpoint, trained.manifest, path, "safetensors", run=trained.run.id, weights=trained.weights
            )
        try:
            example = _example(trained)
            if PROGRAM in FORMATS[form]:
                trial = write_program(model, example, folder / PROGRAM)
            if compiles:
                compiled = compile_program(model, example, folder / PROGRAM, folder / COMPILED)
        except (JobFailedError, RequestError) as error:
            if form == "program":
                raise
            failure = error  # raised below, when the folder with the weights is complete
        for name, text in trained.job.export_files().items():
            fsio.write_stream(folder / name, [text.encode()])
        about = _about(trained, model, example, (trial, compiled), folder)
        fsio.write_json(folder / ABOUT, about)
    if failure is not None and PROGRAM in FORMATS[form]:
        raise JobFailedError(f"{failure}\n{target} has what was written before that")
    return about


def _example(trained: Trained) -> Tensor:
    """Return real inputs of the eval set, two or more: torch.export would take a batch size of one for a constant."""
    eval_set = trained.job.eval_set()
    if eval_set is None:
        raise RequestError(f"job: {trained.config.job} has no eval_set(), whose samples a program is tried on")
    # The job's own evaluation is called with a stand-in for the model, to see what it gives the model.
    first = next(eval_batches(eval_set, Share(0, 1), SAMPLES, collate=trained.job.collate))
    assert first is not None
    args, kwargs = capture_model_inputs(trained.job.evaluate, first) or ((), {})
    if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
        raise JobFailedError(
            "torch.export: the job calls the model with other arguments than one tensor, of which no program is made; "
            "use --format safetensors"
        )
    return args[0] if len(first) > 1 else args[0].repeat_interleave(2, dim=0)


def write_program(model: nn.Module, example: Tensor, path: Path) -> ExportCheck:
    """Export ``model``, which is in evaluation mode, as ``path``, for any number of samples.

    ``example`` (n, ...) are two or more real inputs. Raises JobFailedError where the export fails, or its result
    differs from the model.
    """
    try:
        with torch.no_grad():
            program = torch.export.export(model, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))
        torch.export.save(program, path)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")  # of torch 2.11's own reading
            loaded = torch.export.load(path).module()
        trial = _tried(model, loaded, example, TOLERANCE)
    except Exception as error:  # the model's own code, the tracer and the serializer may raise anything
        path.unlink(missing_ok=True)
        log.info("torch.export failed", exc_info=True)
        raise JobFailedError(
            f"torch.export cannot take this model ({_reason(error)}). Mostly its forward() asks for "
            "the value of a tensor, or fixes the number of samples: rewrite that line, or use --format safetensors"
        ) from error
    return _kept(trial, path)


def compile_program(model: nn.Module, example: Tensor, program: Path, path: Path) -> ExportCheck:
    """Compile the file ``program`` to machine code for processors like this one, as ``path``.

    Raises JobFailedError where that fails, or its result differs from ``model``.
    """
    try:
        torch._inductor.aoti_compile_and_package(torch.export.load(program), package_path=str(path))
        trial = _tried(model, torch._inductor.aoti_load_package(str(path)), example, COMPILED_TOLERANCE)
    except Exception as error:  # of the compiler
        path.unlink(missing_ok=True)
        log.info("AOTInductor failed", exc_info=True)
        raise JobFailedError(
            f"AOTInductor cannot compile this model ({_reason(error)}); is a C++ compiler on the PATH? Leave out --aot"
        ) from error
    return _kept(trial, path)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


@torch.no_grad()
def _tried(model: nn.Module, loaded: Callable[[Tensor], Any], example: Tensor, tolerance: float) -> ExportCheck:
    # All samples, all but one, and one alone: the program must fit any number.
    sizes = tuple(dict.fromkeys((len(example), max(len(example) - 1, 1), 1)))
    differences, largest = list[Tensor](), 1.0
    for size in sizes:
        for one, other in zip(_outputs(model, example[:size]), _outputs(loaded, example[:size]), strict=True):
            # Equal infinities, as of masked logits, differ by nothing: inf - inf would be nan.
            differences.append(torch.where(one == other, 0.0, one - other).abs().max())
            largest = max(largest, float(one.abs().where(one.isfinite(), 0.0).max()))
    return ExportCheck(sizes, float(torch.stack(differences).max()), tolerance * largest)


def _outputs(model: Callable[[Tensor], Any], inputs: Tensor) -> list[Tensor]:
    """Return all tensors that ``model`` returns, in any nesting, in float64."""
    found = [output for output in tree_leaves(model(inputs)) if isinstance(output, Tensor)]
    return [output.to(torch.promote_types(output.dtype, torch.float64)) for output in found]


def _kept(trial: ExportCheck, path: Path) -> ExportCheck:
    """Refuse a program that loads and runs, and computes something else."""
    path.chmod(fsio.FILE_MODE)
    if not trial.largest_difference <= trial.bound:  # a NaN is refused as well
        path.unlink()
        raise JobFailedError(
            f"the exported program is not the model: outputs differ by up to {trial.largest_difference:.3g}, and "
            f"{trial.bound:.3g} is allowed; does forward() draw random numbers in evaluation mode?"
        )
    return trial


@torch.no_grad()
def _about(
    trained: Trained, model: nn.Module, example: Tensor | None, trials: Sequence[ExportCheck | None], folder: Path
) -> dict[str, Any]:
    config, job, manifest = trained.config, trained.job, trained.manifest
    digests: dict[str, str] = {}
    for path in sorted(folder.iterdir()):
        with fsio.open_file(path) as file:
            digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    # There is no trial of a program that was not asked for, or that failed.
    program, compiled = (
        None if trial is None else {"is_bit_for_bit": trial.largest_difference == 0, **asdict(trial)}
        for trial in trials
    )
    return {
        "model": config.model.name,
        "job": config.job,
        "params": config.params,
        "run": trained.run.id,
        "step": manifest.step,
        "weights": trained.weights,
        "metrics": trained.recorded(),
        "classes": list(job.classes),
        "input": _tensor(example),
        "output": None if example is None else _tensor(model(example)),
        "preprocessing": None if job.pictures is None else job.pictures.as_json(),
        "program": program,
        "compiled": compiled,
        "versions": {"torch": torch.__version__, "toolkit": __version__},
        "sha256": digests,
    }


def _tensor(example: Any) -> dict[str, Any] | None:
    if not isinstance(example, Tensor):
        return None
    return {"shape": ["batch", *example.shape[1:]], "dtype": str(example.dtype).removeprefix("torch.")}
