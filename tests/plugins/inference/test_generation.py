"""`toolkit generate` beside transformers' own generate, and what it refuses."""

import io
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from jobs.llama import Llama, LlamaSizes
from jobs.models import mlp
from tests.command import Command
from tests.process_limits import ChangeLimits
from tests.unit.checkpoint.ranks import blank
from toolkit import config as configs
from toolkit.base.errors import EXIT_FAILED, EXIT_REQUEST, JobFailedError
from toolkit.checkpoint.folder import CheckpointFolder, Keep
from toolkit.checkpoint.writer import save
from toolkit.files import rundir
from toolkit.files.rundir import RunDir
from toolkit.plugins.formats.tokens.writer import Encoder, tokenize
from toolkit.plugins.inference import trained_model as inference
from toolkit.plugins.inference.trained_model import Sampling, continuations
from toolkit.ranks.state import Replicated

ROOT = Path(__file__).parents[3]
CONTEXT = 24
TEXTS = ["one two ", "three", "fourteen and "]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """Return a run of the language model on bytes. It has a checkpoint of its first weights."""
    monkeypatch.chdir(ROOT)
    (tmp_path / "a.txt").write_text("one two three four " * 20)
    tokenize([str(tmp_path / "a.txt")], tmp_path / "tokens", Encoder(None, None))
    made = rundir.create("lm")
    sizes = ["params.layers=2", "params.width=24", "params.hidden=40", f"params.length={CONTEXT}"]
    settings = ["job=jobs.language_model", "model.name=llama", "data.name=tokens", f"data.root={tmp_path / 'tokens'}"]
    made.config.write_text(configs.dump_config(configs.load_config(None, [*settings, *sizes])))
    torch.manual_seed(0)
    model = Llama(LlamaSizes(256, layers=2, width=24, heads=4, kv_heads=2, hidden=40))
    keep(made, 7, {name: 10 * value for name, value in model.state_dict().items()})
    return made


def keep(run: RunDir, step: int, weights: dict[str, Tensor]) -> None:
    state = {f"model/{name}": Replicated(value) for name, value in weights.items()}
    save(CheckpointFolder(run.checkpoints, Keep(9)), step, state, {}, rank=0, world_size=1, kv=None)


def answer(command: Command, *argv: str) -> Any:
    return json.loads(command(*argv, "--json"))


def test_the_most_likely_continuation_is_that_of_transformers(run: RunDir, tmp_path: Path, command: Command) -> None:
    transformers: Any = pytest.importorskip("transformers")
    rows = answer(command, "generate", run.id, *TEXTS, "--temperature", "0", "--max-tokens", "9")["continuations"]
    command("export", run.id, str(tmp_path / "out"), "--format", "safetensors")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    for text, row in zip(TEXTS, rows, strict=True):
        prompt = torch.tensor([[*text.encode()]])
        mask = torch.ones_like(prompt)
        ids = theirs.generate(prompt, attention_mask=mask, max_new_tokens=9, do_sample=False, pad_token_id=0)[0]
        ended = ids[-1].item() == 0
        added = ids[prompt.shape[1] : len(ids) - ended].tolist()
        assert (row["prompt"], row["tokens"], row["ended"]) == (text, len(added), ended)
        assert row["text"] == bytes(added).decode(errors="replace")
    assert len({row["text"] for row in rows}) == 3


def test_a_text_beside_others_and_from_a_pipe_has_the_same_continuation(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, change_limits: ChangeLimits, command: Command
) -> None:
    drawn = ["--max-tokens", "6", "--top-k", "40", "--temperature", "0.7", "--seed", "3"]
    together = answer(command, "generate", run.id, *TEXTS, *drawn)["continuations"]
    lines = SimpleNamespace(isatty=lambda: False, buffer=io.BytesIO("\n".join(TEXTS).encode()))
    monkeypatch.setattr(sys, "stdin", lines)
    assert answer(command, "generate", run.id, *drawn)["continuations"] == together
    change_limits(logits_at_once=1)  # each by itself
    assert answer(command, "generate", run.id, *TEXTS, *drawn)["continuations"] == together
    assert answer(command, "generate", run.id, *TEXTS, *drawn[:-1], "4")["continuations"] != together


def of_numbers(run: RunDir, texts: Sequence[str], most: int | None, sampling: Sampling) -> list[dict[str, Any]]:
    """Return the texts of a model that is sure of the next byte. It is the last byte plus one."""

    def following(tokens: Tensor) -> Tensor:
        return 1e4 * one_hot((tokens + 1) % 128, 300)

    with inference.trained(run, CheckpointFolder(run.checkpoints).list()) as trained:
        fake: Any = following
        return continuations(replace(trained, model=fake), texts, most, sampling)


def test_a_continuation_ends_with_its_document_or_its_room(run: RunDir) -> None:
    one, two = of_numbers(run, ["ab", "\x7d"], 5, Sampling())
    assert one == {"prompt": "ab", "text": "cdefg", "tokens": 5, "ended": False}
    assert two == {"prompt": "\x7d", "text": "\x7e\x7f", "tokens": 2, "ended": True}
    assert of_numbers(run, ["ab"], None, Sampling())[0]["tokens"] == CONTEXT - 2


def test_tokens_are_drawn_as_often_as_softmax_says() -> None:
    logits, draw = torch.tensor([1.0, 3.0, 2.0, -1.0]), torch.Generator().manual_seed(0)
    for sampling, expected in (
        (Sampling(), logits.softmax(0)),
        (Sampling(temperature=0.5), (logits * 2).softmax(0)),
        (Sampling(top_k=2), torch.tensor([0.0, *logits[1:3].softmax(0), 0.0])),
        (Sampling(temperature=0), torch.tensor([0.0, 1.0, 0.0, 0.0])),
    ):
        found = torch.tensor([sampling.choose(logits, draw) for _ in range(1500)]).bincount(minlength=4) / 1500
        torch.testing.assert_close(found, expected, atol=0.05, rtol=0)
    with pytest.raises(JobFailedError, match="not finite"):
        Sampling().choose(torch.tensor([1.0, torch.nan]), draw)


def test_what_a_terminal_takes_for_a_command_is_escaped(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    found = [{"prompt": "a", "text": "\x1b[2Jé\tx\n"}, {"prompt": "b" * 50, "text": "y"}]
    monkeypatch.setattr(inference, "continuations", lambda *_: found)
    assert command("generate", run.id, "a") == f"'a':\n\\x1b[2Jé\tx\n\n\n'{'b' * 45}...':\ny\n"
    del found[1]
    assert command("generate", run.id, "a") == "\\x1b[2Jé\tx\n\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["x" * CONTEXT],
            f"has {CONTEXT} tokens, which with 1 more are over the {CONTEXT} that the model was trained on",
        ),
        (["abc", "--max-tokens", "22"], "'abc' has 3 tokens, which with 22 more are over the 24"),
        (["a", ""], "'' has no tokens; give a text that is not empty"),
        (["a", "--max-tokens", "0"], "--max-tokens: 0 is out of range; must be 1 or more"),
        (["a", "--top-k", "0"], "--top-k: 0 is out of range; must be 1 or more"),
        (["a", "--temperature", "nan"], "--temperature: nan is out of range; must be 0 or more"),
        (["a", "--seed", "-1"], "--seed: -1 is out of range; must be 0 or more"),
        (["a", "--checkpoint", "9"], "no checkpoint of step 9; there are: 7"),
        ([], "there is no text on the standard input"),
    ],
)
def test_a_request_that_cannot_be_met_says_why(
    words: list[str], says: str, run: RunDir, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: False, buffer=io.BytesIO(b"\n\n")))
    told = command.ends(EXIT_REQUEST, "generate", run.id, *words)
    assert says in told.err
    assert told.out == ""


def test_runs_without_a_language_model_or_a_checkpoint_are_refused(run: RunDir, command: Command) -> None:
    blank(run.checkpoints / "step-00000007/rank-00000.safetensors")
    command.ends(EXIT_FAILED, "generate", run.id, "a")
    other = rundir.create("digits")
    config = configs.load_config(None, ["model.name=mlp"], site=False)
    other.config.write_text(configs.dump_config(config))
    assert "no checkpoint; there are: none" in command.refuses("generate", other.id, "a")
    keep(other, 1, mlp(10, (1, 8, 8)).state_dict())
    assert "jobs.classify of run" in (said := command.refuses("generate", other.id, "a"))
    assert "is not a language model" in said
