"""One base and many adapters: generated text, batches, and memory.

Models are tiny and loud: every product changes the logits, so a row with a wrong adapter would not go unnoticed.
"""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.core.errors import CheckpointError, RecipeError, ShardwiseError
from shardwise.data.tokenizer import ByteTokenizer
from shardwise.model.adapted import AdaptedModel
from shardwise.model.blueprint import Blueprint
from shardwise.model.files.peft import CONFIG, TENSORS, write_adapter
from shardwise.model.lora import LoraLinear, is_adapter
from shardwise.model.native import NativeModel
from shardwise.plugins.serve.decoding import Again, Native, Transformers, reader_of
from shardwise.plugins.serve.load import OpenedModel, meta_model, open_model
from shardwise.plugins.serve.requests import Request, read_requests
from shardwise.plugins.serve.samples import record_sample
from shardwise.plugins.serve.sampling import Sampling
from shardwise.plugins.serve.serving import ServedModel, load_model
from shardwise.recipe.dimensions import Dimensions
from shardwise.recipe.load import dump_recipe, recipe_of
from shardwise.recipe.sections import AdapterSpec
from shardwise.runtime.fingerprint import fingerprint_of
from shardwise.runtime.parallel.shard_slices import local_part, named_parameters
from shardwise.verifier.reference import reference_model
from tests.harness.modules import with_large_weights
from tests.harness.tiers import quick

torch.set_num_threads(1)

FAMILIES: dict[str, Dimensions] = {
    "llama": Dimensions(2, 24, 4, 2, 40, vocab=260, context=128),
    "qwen3": Dimensions(2, 24, 4, 2, 40, vocab=260, context=128, family="qwen3", head_dim=10),
    "gpt2": Dimensions(2, 24, 2, 2, 40, vocab=260, context=128, family="gpt2", tied=True),
    "mixture": Dimensions(2, 24, 4, 2, 40, vocab=260, context=128, experts=5, shared_ffn=16),
    "latent": Dimensions(
        2, 24, 4, 4, 40, vocab=260, context=128, head_dim=10, kv_lora_rank=12, rope_head_dim=4, v_head_dim=6
    ),
}
TEXTS = [b"a much longer prompt than the others", b"def ", b"x", b"class A:"]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"rank": 4, "targets": "all"},
    "thin": {"rank": 1, "targets": ("q_proj", "down_proj"), "rank_stabilized": True},
    "dora": {"rank": 3, "targets": "attention", "name": "dora"},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


def native(family: str = "llama", context: int | None = 64) -> OpenedModel:
    blueprint = NativeModel(FAMILIES[family])
    model = with_large_weights(reference_model(blueprint, 0, torch.float32)).requires_grad_(False)
    return OpenedModel(blueprint, model, ByteTokenizer(), context, torch.float32, ByteTokenizer().ends)


def trained(
    blueprint: Blueprint, base: nn.Module, seed: int, **values: Any
) -> tuple[AdaptedModel, nn.Module]:
    """The base with an adapter that changes what it says."""
    adapted = AdaptedModel(blueprint, AdapterSpec(**({"alpha": 8.0} | values)))
    model = adapted.build()
    held = dict(named_parameters(base))
    chance = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in named_parameters(model):
            if not is_adapter(name):
                parameter.copy_(held[name])
            elif parameter.ndim == 2:
                parameter.normal_(0.0, 0.2, generator=chance)
            else:
                parameter.uniform_(0.8, 1.6, generator=chance)
    return adapted, model.eval()


def merged(model: nn.Module) -> nn.Module:
    """The adapters put into the weights: what the bank must equal."""
    model = copy.deepcopy(model)
    for path, layer in list(model.named_modules()):
        if not isinstance(layer, LoraLinear):
            continue
        weight = layer.plain_weight(torch.float64)
        weight += layer.scale * (layer.lora_B.weight.double() @ layer.lora_A.weight.double())
        if layer.lora_magnitude_vector is not None:
            weight *= (layer.lora_magnitude_vector.double() / weight.norm(dim=1)).unsqueeze(1)
        plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
        plain.weight = nn.Parameter(weight.float())
        plain.bias = layer.bias
        model.set_submodule(path, plain)
    return model


def saved(adapted: AdaptedModel, model: nn.Module, folder: Path, known: bool = True) -> Path:
    tensors = {name: p.detach() for name, p in named_parameters(model) if is_adapter(name)}
    write_adapter(folder, tensors, adapted.config(), fingerprint_of(model) if known else None)
    return folder


def three(opened: OpenedModel, place: Path) -> tuple[dict[str, Path], dict[str, nn.Module]]:
    """An adapter of every kind: their folders, and the merged models."""
    folders, models = {}, {}
    for seed, (name, values) in enumerate(KINDS.items()):
        if opened.blueprint.name.startswith("hf-gpt2") and isinstance(values["targets"], tuple):
            values = values | {"targets": ("c_attn", "mlp.c_proj")}
        adapted, model = trained(opened.blueprint, opened.model, seed, **values)
        folders[name] = saved(adapted, model, place / f"{opened.blueprint.name}-{name}")
        models[name] = merged(model)
    return folders, models


@torch.no_grad()
def last_logits(blueprint: Blueprint, model: nn.Module, text: bytes) -> Tensor:
    return blueprint.logits(model, torch.tensor([list(text)]))[0, -1]


@torch.no_grad()
def read(served: ServedModel, names: list[str], texts: list[bytes], cached: bool = True) -> list[Tensor]:
    """Logits after every prefix of the texts' last three tokens: begun, and followed twice."""
    opened = served._opened
    reader = reader_of(opened.blueprint, opened.model, served.bank, cached)
    found = [reader.begin([list(text[:-2]) for text in texts], names, 2)]
    found += [reader.follow([text[step] for text in texts]) for step in (-2, -1)]
    return found


LONG = [text + b"end" for text in TEXTS]


# ---- the cache --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_with_a_cache_reads_as_each_text_alone(family: str) -> None:
    opened = native(family)
    found = read(ServedModel(opened), ["base"] * 4, LONG)
    for row, text in enumerate(LONG):
        for step, cut in enumerate((len(text) - 2, len(text) - 1, len(text))):
            expected = last_logits(opened.blueprint, opened.model, text[:cut])
            torch.testing.assert_close(found[step][row], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("context", quick([None, 24], 24), ids=["endless", "moving window"])
def test_texts_do_not_depend_on_cache_or_company(family: str, context: int | None) -> None:
    """Some end early, some move their window while others do not."""
    served = ServedModel(native(family, context))
    how = [
        Sampling(tokens=tokens, seed=seed, temperature=temperature, past_end=True)
        for seed, (tokens, temperature) in enumerate([(30, 0.0), (5, 1.0), (40, 1.0), (33, 0.7)])
    ]
    texts = [text[: context or 99].decode() for text in TEXTS]
    requests = [Request(text, sampling=each) for text, each in zip(texts, how, strict=True)]
    together = served.complete(requests, batch=4)
    assert together == served.complete(requests, batch=1)
    pieces = list(served.generate(requests, batch=3, cached=False))
    assert together == ["".join(p.text for p in pieces if p.request == row) for row in range(4)]
    assert len(set(together)) == 4 and all(together)


def test_ids_that_the_tokenizer_does_not_know_are_never_taken() -> None:
    opened = native()
    with torch.no_grad():
        opened.model.get_parameter("lm_head.weight")[256:] *= 100
    served = ServedModel(opened)
    # Ids of 256 and more would be no bytes.
    served.complete([Request("x", sampling=Sampling(tokens=40, temperature=0.5, past_end=True))])


def test_an_answer_ends_at_the_end_of_text_or_a_stop_text() -> None:
    opened = native()
    free = Sampling(tokens=60, temperature=3.0, top_k=None, past_end=True)
    served = ServedModel(opened)
    [text] = served.complete([Request("x", sampling=free)])
    half = text[20:22]
    stopping = Sampling(60, 3.0, None, stop=(half,), past_end=True)
    pieces = list(served.generate([Request("x", sampling=stopping)]))
    assert "".join(piece.text for piece in pieces) == text[: text.index(half)]
    assert [piece.end for piece in pieces if piece.end] == ["stop"]
    with torch.no_grad():  # the separator is now the likeliest
        opened.model.get_parameter("lm_head.weight").zero_()
    pieces = list(served.generate([Request("x", sampling=Sampling(60, 0.0))]))
    assert [(piece.text, piece.end) for piece in pieces] == [("", "end of text")]


# ---- the bank ---------------------------------------------------------------------------------------------


# Not a mixture: how many rows an expert has depends on the other texts, and its product's last bits with it.
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_a_mixed_batch_is_what_each_merged_model_says(family: str, place: Path) -> None:
    opened = native(family)
    plain = read(ServedModel(native(family)), ["base"] * 4, LONG)
    folders, models = three(opened, place)
    served = ServedModel(opened, folders)
    names = ["dora", "base", "thin", "plain"]
    mixed = read(served, names, LONG)
    for row, name in enumerate(names):
        model = opened.model if name == "base" else models[name]
        served.bank.select(())
        expected = last_logits(opened.blueprint, model, LONG[row])
        torch.testing.assert_close(mixed[-1][row], expected, atol=1e-5, rtol=1e-5)
        if name == "base":
            assert all(torch.equal(m[row], p[row]) for m, p in zip(mixed, plain, strict=True))
        else:
            assert (mixed[-1][row] - plain[-1][row]).abs().max() > 0.05
    for name in folders:  # a batch of one adapter goes another way
        alone = read(served, [name] * 4, LONG)[-1]
        expected = last_logits(opened.blueprint, models[name], LONG[2])
        torch.testing.assert_close(alone[2], expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(read(served, ["base"] * 4, LONG)[-1], plain[-1])


def test_memory_is_the_base_and_the_adapters_and_a_switch_moves_none_of_it(place: Path) -> None:
    opened = native()
    before = {name: (p.data_ptr(), p.clone()) for name, p in named_parameters(opened.model)}
    adapted, model = trained(opened.blueprint, opened.model, 9, **KINDS["plain"])
    folders = {f"a{i}": saved(adapted, model, place / f"many-{i}") for i in range(50)}
    served = ServedModel(opened, folders)
    base = sum(p.nbytes for _, p in named_parameters(opened.model))
    each = sum(p.nbytes for name, p in named_parameters(model) if is_adapter(name))
    assert served.nbytes == base + 50 * each
    assert served.bank.select(["a0", "a49", "base", "a7"]) == 4 * 12
    assert served.bank.select(["a3"] * 4) == 12
    for name, parameter in named_parameters(opened.model):
        where, value = before[name]
        assert parameter.data_ptr() == where and torch.equal(parameter, value)


def test_texts_of_adapters_are_those_of_the_merged_models(place: Path) -> None:
    """Two iterators at once, too: each puts its own adapters back before it reads."""
    opened = native()
    folders, models = three(opened, place)
    served = ServedModel(opened, folders)
    how = Sampling(tokens=12, temperature=0.0, past_end=True)
    first = served.generate([Request("def ", "plain", how), Request("x", "base", how)])
    second = served.generate([Request("def ", "dora", how)])
    texts: dict[tuple[int, int], str] = {}
    running = {0: first, 1: second}
    while running:
        for which, pieces in list(running.items()):
            piece = next(pieces, None)
            if piece is None:
                del running[which]
            else:
                key = (which, piece.request)
                texts[key] = texts.get(key, "") + piece.text
    for key, model in {(0, 0): models["plain"], (0, 1): native().model, (1, 0): models["dora"]}.items():
        alone = ServedModel(
            OpenedModel(opened.blueprint, model, ByteTokenizer(), 64, torch.float32, opened.ends)
        )
        assert [texts[key]] == alone.complete([Request("x" if key == (0, 1) else "def ", sampling=how)])


def test_threads_keep_their_adapters(place: Path) -> None:
    opened = native()
    folders, _ = three(opened, place)
    served, how = ServedModel(opened, folders), Sampling(tokens=8, temperature=0.0, past_end=True)
    requests = [Request("def ", name, how) for name in served.adapters]
    with ThreadPoolExecutor(len(requests)) as threads:
        between = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            found = list(threads.map(lambda request: served.complete([request])[0], requests * 6))
        finally:
            sys.setswitchinterval(between)
    assert found == served.complete(requests) * 6


def test_the_bias_of_a_router_is_not_rounded() -> None:
    sizes = Dimensions(1, 24, 4, 2, 40, vocab=260, experts=4, router="sigmoid", router_bias=True)
    model = meta_model(NativeModel(sizes), None, torch.bfloat16)
    kinds = (
        {tensor.dtype for _, tensor in model.named_buffers()},
        {tensor.dtype for tensor in model.parameters()},
    )
    assert kinds == ({torch.float32}, {torch.bfloat16})


# ---- models of transformers -------------------------------------------------------------------------------


def hf_folder(kind: str, place: Path) -> Path:
    transformers = pytest.importorskip("transformers")
    folder = place / f"hf-{kind}"
    if folder.exists():
        return folder
    if kind == "gpt2":
        sizes = {"n_embd": 24, "n_layer": 2, "n_head": 2, "n_positions": 64}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=260, **sizes))
    else:
        sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=260, **sizes, **heads))
    with_large_weights(model).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_models_of_transformers(kind: str, place: Path) -> None:
    opened = open_model(hf_folder(kind, place), "bytes", torch.float32, torch.device("cpu"))
    assert opened.context == 64
    folders, models = three(opened, place)
    served = ServedModel(opened, folders)
    assert isinstance(reader_of(opened.blueprint, opened.model, served.bank), Transformers)
    names = ["dora", "base", "thin", "plain"]
    mixed = read(served, names, LONG)[-1]
    again = read(served, names, LONG, cached=False)[-1]
    for row, name in enumerate(names):
        served.bank.select(())
        model = opened.model if name == "base" else models[name]
        expected = last_logits(opened.blueprint, model, LONG[row])
        torch.testing.assert_close(mixed[row], expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(again[row], expected, atol=1e-5, rtol=1e-5)
    how = [Sampling(tokens=tokens, seed=tokens, past_end=True) for tokens in (30, 4, 50)]
    requests = [Request(TEXTS[i].decode(), names[i], each) for i, each in enumerate(how)]
    assert served.complete(requests, batch=3) == served.complete(requests, batch=1)


def test_which_reader_a_model_gets(place: Path) -> None:
    opened = native()
    bank = ServedModel(opened).bank
    assert isinstance(reader_of(opened.blueprint, opened.model, bank), Native)
    assert isinstance(reader_of(opened.blueprint, opened.model, bank, cached=False), Again)
    assert isinstance(reader_of(opened.blueprint, nn.Linear(1, 1), bank), Again)


# ---- runs -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_folder(place: Path) -> Callable[..., tuple[Path, nn.Module, AdaptedModel | None]]:
    """Makes the folder of a run as it is after its last save; what it saved."""
    from shardwise.checkpoint.adapter import leave
    from shardwise.checkpoint.checkpoint import save_checkpoint
    from shardwise.engine.build import build
    from shardwise.engine.train_state import TrainState
    from shardwise.launch.process import join
    from shardwise.model.open import blueprint_of
    from shardwise.technique import strategy_from

    def make(name: str, adapter: dict[str, Any] | None) -> tuple[Path, nn.Module, AdaptedModel | None]:
        folder = place / name
        values: dict[str, Any] = {
            "model": {"layers": 2, "width": 24, "heads": 2, "ffn": 40, "vocab": 256, "context": 64},
            "data": {"sequence_length": 48},
            "steps": 1,
            "batch_size": 1,
        }
        recipe = recipe_of(values | ({"adapter": adapter} if adapter else {}))
        blueprint = blueprint_of(recipe)
        folder.mkdir()
        (folder / "recipe.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
        with join("cpu") as world:
            run = build(
                recipe, blueprint, strategy_from({"precision": "fp32", "zero_stage": 0}), world.device
            )
            chance = torch.Generator().manual_seed(5)
            with torch.no_grad():
                for tensor_name, parameter in named_parameters(run.model):
                    if is_adapter(tensor_name) and parameter.ndim == 2:
                        local_part(parameter).normal_(0.0, 0.3, generator=chance)
            save_checkpoint(run, TrainState(1, 1), folder / "checkpoints", 1)
            leave(run, folder)
            held = {n: local_part(p).clone() for n, p in named_parameters(run.model)}
        model = reference_model(blueprint, 1, torch.float32).eval()
        with torch.no_grad():
            for tensor_name, parameter in named_parameters(model):
                parameter.copy_(held[tensor_name])
        return folder, model, blueprint if isinstance(blueprint, AdaptedModel) else None

    return make


@pytest.mark.parametrize("quantize", ["none", "nf4", "int8"])
def test_a_run_with_an_adapter_is_its_base_and_one_adapter(quantize: str, run_folder: Any) -> None:
    folder, model, blueprint = run_folder(f"run-{quantize}", {"rank": 2, "alpha": 4, "quantize": quantize})
    served = load_model(folder)
    assert served.adapters == ["own", "base"]
    if quantize != "none":
        assert any(name.endswith(".packed") for name, _ in named_parameters(served.model))
    found = read(served, ["own", "base"], LONG[:2])[-1]
    expected = last_logits(blueprint, model, LONG[0])
    torch.testing.assert_close(found[0], expected, atol=1e-5, rtol=1e-5)
    assert (found[1] - last_logits(blueprint, model, LONG[1])).abs().max() > 1e-3
    # Without a name the run's own adapter is used; its files on the base give the same adapter.
    again = load_model(folder, {"files": folder})
    how = Sampling(tokens=8, temperature=0.0, past_end=True)
    texts = again.complete([Request("x", name, how) for name in (None, "own", "files", "base")])
    assert texts[0] == texts[1] == texts[2]


def test_a_full_run_as_base_knows_its_adapters(run_folder: Any, place: Path) -> None:
    """The adapter of a run that started from the same weights, and one of another base."""
    folder, model, _ = run_folder("full", None)
    blueprint = NativeModel(Dimensions(2, 24, 2, 2, 40, vocab=256, context=64))
    adapted, with_adapter = trained(blueprint, model, 2, rank=2)
    good = saved(adapted, with_adapter.requires_grad_(False), place / "good", known=False)
    served = load_model(folder, {"good": good})
    found = read(served, ["good"], LONG[:1])[-1][0]
    torch.testing.assert_close(
        found, last_logits(blueprint, merged(with_adapter), LONG[0]), atol=1e-5, rtol=1e-5
    )
    tensors = {n: p.detach() for n, p in named_parameters(with_adapter) if is_adapter(n)}
    write_adapter(place / "other", tensors, adapted.config(), "0" * 32)
    with pytest.raises(CheckpointError, match="for another base") as caught:
        load_model(folder, {"other": place / "other"})
    assert caught.value.exit_code == 4 and "fingerprint 0000" in caught.value.line()


def test_the_page_runs(
    run_folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What docs/how-to/serve-adapters.md shows: its Python, and its file of requests."""
    page = Path(__file__).parents[3] / "docs" / "how-to" / "serve-adapters.md"
    blocks = dict(re.findall(r"^```(python|json)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S))
    places = {
        "runs/base": run_folder("page-base", None)[0],
        "runs/stories": run_folder("page-stories", {"rank": 2})[0],
        "adapters/py": run_folder("page-py", {"rank": 3, "name": "dora"})[0] / "adapter",
    }
    for name, folder in places.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(blocks["python"], page.name, "exec"), names)  # noqa: S102
    assert capsys.readouterr().out == names["texts"][0] != ""
    Path("asked.jsonl").write_text(blocks["json"], encoding="utf-8")
    requests = read_requests(Path("asked.jsonl"), Sampling(tokens=3))
    assert [request.adapter for request in requests] == ["python", "stories", "base"]
    assert len(names["model"].complete(requests)) == 3


def test_a_prompt_may_hold_every_line_end_of_unicode(tmp_path: Path) -> None:
    prompt = "one\u2028two\u2029three\u0085four"
    (tmp_path / "asked.jsonl").write_text(f'{{"prompt": "{prompt}"}}\n\n', encoding="utf-8")
    [request] = read_requests(tmp_path / "asked.jsonl", Sampling())
    assert request.prompt == prompt


def test_a_run_without_a_report_gets_no_sample(tmp_path: Path) -> None:
    """One that had nothing left to do, as it was killed after its last checkpoint."""
    record_sample(tmp_path)
    assert not list(tmp_path.iterdir())


# ---- refusals ---------------------------------------------------------------------------------------------


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    from safetensors.torch import load_file, save_file

    save_file(change(load_file(folder / TENSORS)), folder / TENSORS)


def _cut(folder: Path) -> None:
    (folder / TENSORS).write_bytes((folder / TENSORS).read_bytes()[:-9])


def _without_b(folder: Path) -> None:
    rewrite(folder, lambda held: {name: t for name, t in held.items() if "1.mlp.up_proj.lora_B" not in name})


def _without_end(folder: Path) -> None:
    rewrite(folder, lambda held: {name: t[:-1] if "q_proj.lora_B" in name else t for name, t in held.items()})


def _infinite(folder: Path) -> None:
    rewrite(folder, lambda held: {name: t / 0 for name, t in held.items()})


def _of_elsewhere(folder: Path) -> None:
    rewrite(folder, lambda held: {name.replace("layers.1", "layers.7"): t for name, t in held.items()})


def _ranked(folder: Path) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | {"r": 16}))


DAMAGES: list[tuple[Callable[[Path], Any], str]] = [
    (_cut, "is damaged"),
    (_without_b, "the adapter is incomplete"),
    (_without_end, "for another base"),
    (_infinite, "not finite"),
    (_of_elsewhere, "is not a linear layer of this model"),
    (_ranked, "gives it the rank 16"),
    (lambda folder: (folder / CONFIG).unlink(), "not an adapter's folder"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=[message for _, message in DAMAGES])
def test_an_adapter_that_cannot_be_served(damage: Any, message: str, tmp_path: Path) -> None:
    opened = native()
    adapted, model = trained(opened.blueprint, opened.model, 0, rank=2)
    folder = saved(adapted, model, tmp_path / "a", known=False)
    damage(folder)
    with pytest.raises(CheckpointError) as caught:
        ServedModel(opened, {"a": folder})
    line = caught.value.line()
    assert message in line and "/a" in line and caught.value.exit_code == 4


def test_folders_and_names_that_are_not_there(tmp_path: Path, place: Path) -> None:
    opened = native()
    folders, _ = three(opened, place)
    served = ServedModel(opened, folders)
    raising: list[tuple[Callable[[], object], type[ShardwiseError], str]] = [
        (lambda: ServedModel(opened, {"a": tmp_path / "no"}), CheckpointError, "no such adapter"),
        (lambda: ServedModel(opened, {"base": folders["dora"]}), RecipeError, "cannot be named base"),
        (lambda: load_model(tmp_path), CheckpointError, "not the folder of a run or of a model"),
        (lambda: load_model(tmp_path, precision="fp4"), RecipeError, "precision"),
        (lambda: load_model(tmp_path, device="abacus"), RecipeError, "no device 'abacus'"),
        (
            lambda: served.generate([Request("x", "unknown")]),
            RecipeError,
            "no adapter is named 'unknown' (request 1)",
        ),
        (
            lambda: served.generate([Request("y" * 65)]),
            RecipeError,
            "it has 65 tokens, and the context has 64",
        ),
    ]
    for action, kind, message in raising:
        with pytest.raises(kind) as caught:
            action()
        assert message in caught.value.line()
