from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from jobs.llama import Llama, LlamaSizes
from jobs.models import lenet, mlp
from toolkit.base.errors import ConfigError
from toolkit.plugins.model_parallel import pipeline as strategy
from toolkit.plugins.model_parallel.stages import StagePlan, plan, retain_layers, tensors

BYTES = torch.zeros(2, 16, dtype=torch.long)
IMAGE = torch.zeros(2, 1, 8, 8)
ROW = torch.zeros(2, 4)


def llama(layers: int = 6) -> Llama:
    torch.manual_seed(0)
    return Llama(LlamaSizes(256, layers, width=32, heads=2, kv_heads=1, hidden=64))


def test_a_transformer_is_cut_evenly_by_operations_embeddings_first_and_head_last() -> None:
    layers = [f"model.layers.{number}" for number in range(6)]
    found = plan(llama(), BYTES, 3, [])
    assert found.stages == (
        ("model.embed_tokens", *layers[:2]),
        tuple(layers[2:4]),
        (*layers[4:], "model.norm", "lm_head"),
    )
    assert found.idle == ()
    assert found.with_input == set(layers)


def test_layers_without_parameters_stay_with_the_one_before_them() -> None:
    assert plan(mlp(10, (1, 8, 8)), IMAGE, 2, []).stages == (("0", "1", "2"), ("3",))
    stages = plan(lenet(10, (1, 8, 8)), IMAGE, 5, []).stages
    assert [names[0] for names in stages] == ["0", "3", "7", "9", "11"]


def test_a_stage_begins_with_each_layer_that_is_named_also_by_what_holds_it() -> None:
    named = plan(llama(), BYTES, 3, ["model.layers.1", "model.norm"])
    assert [names[0] for names in named.stages] == ["model.embed_tokens", "model.layers.1", "model.norm"]
    held = plan(llama(), BYTES, 2, ["model.layers"])
    assert [names[0] for names in held.stages] == ["model.embed_tokens", "model.layers.0"]


@pytest.mark.parametrize(
    ("model", "inputs", "stages"),
    [(llama, BYTES, 3), (lambda: lenet(10, (1, 8, 8)), IMAGE, 4), (lambda: mlp(10, (1, 8, 8)), IMAGE, 1)],
    ids=["llama", "lenet", "one stage"],
)
def test_stages_keep_the_models_own_names_and_compute_the_same_in_sequence(
    model: Callable[[], nn.Module], inputs: Tensor, stages: int
) -> None:
    whole = model().eval()
    found = plan(whole, inputs, stages, [])
    hidden, names = inputs, list[str]()
    for stage, layers in enumerate(found.stages):
        part = model().eval()
        part.load_state_dict(whole.state_dict())
        retain_layers(part, found.kept([stage]))
        names += part.state_dict()
        assert list(tensors(whole, found.kept([stage]))) == list(part.state_dict())
        for layer in layers:
            given = (inputs,) if layer in found.with_input else ()
            hidden = part.get_submodule(layer)(hidden, *given)
    assert sorted(names) == sorted(whole.state_dict())
    assert torch.equal(hidden, whole(inputs))


def test_watching_leaves_mode_hooks_and_statistics_of_the_model_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plan(model, ROW + 1, 2, [])
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Frozen(nn.Module):
    """A model with a layer that no pass calls and that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(4, 4).requires_grad_(False)
        self.chain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.chain(inputs)


def test_a_frozen_layer_that_is_not_used_stays_with_the_first_stage() -> None:
    found = plan(Frozen(), ROW, 2, [])
    assert found == StagePlan((("chain.0",), ("chain.1",)), ("spare",))
    assert found.kept([0]) == ["chain.0", "spare"]
    assert found.kept([1]) == ["chain.1"]


def chained(pass_on: Callable[[Any, Tensor], Tensor], **more: nn.Module) -> nn.Module:
    """Return a model of two linear layers that ``pass_on(model, inputs)`` calls. They are ``one`` and ``two``."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
            for name, module in more.items():
                self.add_module(name, module)

        def forward(self, inputs: Tensor) -> Tensor:
            return pass_on(self, inputs)

    return Model()


class Pair(nn.Module):
    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return inputs, inputs


def loose() -> nn.Module:
    model = chained(lambda m, x: m.two(m.one(x)))
    model.scale = nn.Parameter(torch.ones(4))
    return model


def tied() -> nn.Module:
    model = chained(lambda m, x: m.two(m.one(x)))
    model.two.weight = model.one.weight  # type: ignore[union-attr]
    return model


def nearly(model: nn.Module, inputs: Tensor) -> Tensor:
    hidden = model.one(inputs)  # type: ignore[operator]
    return model.two(hidden.mul_(2))  # type: ignore[operator]


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (lambda: chained(lambda m, x: m.two(m.one(x).tanh())), "between one and two the model computes something"),
        (lambda: chained(nearly), "between one and two the model computes something"),
        (lambda: chained(lambda m, x: m.one(x) + m.two(x)), "between one and two the model computes something"),
        (lambda: chained(lambda m, x: m.one(x * 2)), "between the model's input and one the model computes"),
        (lambda: chained(lambda m, x: m.two(m.one(x)) + 1), "between two and the model's output the model computes"),
        (
            lambda: chained(lambda m, x: m.two(m.both(m.one(x), x + 1)), both=nn.Bilinear(4, 4, 4)),
            "both is called with 2 arguments",
        ),
        (lambda: chained(lambda m, x: m.pair(m.one(x))[0], pair=Pair()), "pair returns a tuple and no tensor"),
        (lambda: chained(lambda m, x: m.two(m.one(m.one(x)))), "one is called twice in a pass"),
        (lambda: chained(lambda m, x: m.one(x)), "model: the loss does not depend on two.weight, two.bias; freeze"),
        (loose, "scale belongs to the model and to none of its layers"),
        (tied, "one.weight and two.weight are one parameter, and belong to different stages"),
    ],
    ids=[
        "a function",
        "in place",
        "two branches",
        "before",
        "after",
        "two arguments",
        "a tuple",
        "called twice",
        "unused",
        "a loose parameter",
        "tied",
    ],
)
def test_a_model_that_is_no_chain_is_refused_with_the_place_where_it_is_not(
    model: Callable[[], nn.Module], says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(model(), ROW, 2, [])
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("stages", "split", "says"),
    [
        (11, [], "strategy.mesh.stages: this model has 9 layers with parameters to train, too few for 11 stages"),
        (2, ["model.layer.3"], "split: no layer 'model.layer.3'; did you mean 'model.layers.3'? there are, in this or"),
        (3, ["model.layers.3", "model.layers.1"], "model.layers.3, model.layers.1 do not follow each other"),
        (2, ["model.embed_tokens"], "strategy.pipeline.split: model.embed_tokens do not follow each other"),
    ],
    ids=["too many stages", "unknown", "backwards", "the first one"],
)
def test_a_cut_that_cannot_be_made_is_refused_with_the_layers_there_are(
    stages: int, split: list[str], says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(llama(), BYTES, stages, split)
    assert says in str(caught.value)


def test_a_stage_without_a_parameter_to_train_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"split: stage 1 \(2\) has no parameter to train"):
        plan(mlp(10, (1, 8, 8)), IMAGE, 3, ["2", "3"])


class Turn(nn.Linear):
    """A layer that passes on features by samples."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs).T


class Back(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs.T)


def test_samples_must_be_the_first_dimension_where_a_stage_ends_and_only_there() -> None:
    model = nn.Sequential(Turn(4, 3), Back(3, 4), nn.Linear(4, 4))
    assert plan(model, ROW, 2, ["2"]).stages == (("0", "1"), ("2",))
    with pytest.raises(ConfigError, match="split: 0 ends a stage and does not return one row for each sample"):
        plan(model, ROW, 2, ["1"])


def test_after_a_load_replicas_are_sent_no_step_counts_which_adam_has_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[Tensor] = []
    monkeypatch.setattr(strategy, "broadcast_tensors", lambda values, *_: sent.extend(values))
    weight, step = torch.ones(3), torch.tensor(5.0)
    grid = SimpleNamespace(replicas=2, ranks=2, first_replica=0)
    update = SimpleNamespace(on_loaded=lambda values: None)
    stage: Any = SimpleNamespace(
        _grid=grid,
        _replica_group=None,
        _update=update,
        live_state=lambda: {"weights/w": weight, "optimizer/w/step": step},
    )
    strategy.Pipeline.on_loaded(stage, {})
    assert [id(value) for value in sent] == [id(weight)]
