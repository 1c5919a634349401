"""Wrong recipes and overrides, one a row: each is one line that names the file, the line and the key.

All rows are loaded in one child process, which reports what it printed, how long each row took and whether
torch came in; the first thing a user meets must not cost an import of torch.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

GOOD = """\
model:
  layers: 2
  width: 64
  heads: 4
data:
  source: stdlib
  sequence_length: 128
steps: 100
batch_size: 16
optimizer: {name: adamw, learning_rate: 3.0e-4, betas: [0.9, 0.95], clip_norm: 1.0}
schedule: {name: cosine, warmup: 0.03, floor: 0.1}
cluster:
  device: cpu
  devices_per_node: 2
strategy:
  zero_stage: 3
  precision: fp32
checkpoint: {every: 50, keep: 2}
evaluation: {sequences: 8}
"""


@dataclass(frozen=True)
class Case:
    """`old` replaced by `new` in the good recipe (no `old`: `new` is the whole file), and the expected message.

    `where` is what stands in the brackets, after the file's name when it begins with a colon. `says` are
    pieces of the rest of the line.
    """

    name: str
    where: str
    says: tuple[str, ...]
    old: str = ""
    new: str | bytes = GOOD
    overrides: tuple[str, ...] = ()

    def content(self) -> bytes:
        text = self.new
        if self.old:
            assert isinstance(text, str) and GOOD.count(self.old) == 1, self.old
            text = GOOD.replace(self.old, text)
        return text if isinstance(text, bytes) else text.encode()


def edit(name: str, old: str, new: str, where: str, *says: str) -> Case:
    return Case(name, where, says, old=old, new=new)


def whole(name: str, new: str | bytes, where: str, *says: str) -> Case:
    return Case(name, where, says, new=new)


def override(name: str, overrides: str | tuple[str, ...], where: str, *says: str) -> Case:
    return Case(name, where, says, overrides=(overrides,) if isinstance(overrides, str) else overrides)


FILES = [
    whole("empty", "", ":1", "empty"),
    whole("comments only", "# nothing\n\n", ":1", "empty"),
    whole("a byte order mark only", b"\xef\xbb\xbf", ":1", "empty"),
    whole("null", "---\n...\n", ":1", "empty"),
    whole("a list", "- model\n- data\n", ":1", "a list"),
    whole("a word", "\nmodel\n", ":2", "the text 'model'"),
    whole("no space after the colon", "steps:100\n", ":1", "put a space after each colon"),
    whole("UTF-16", GOOD.encode("utf-16"), ":1", "not UTF-8", "0xff"),
    whole("latin-1", GOOD.replace("stdlib", "caf\xe9").encode("latin-1"), ":6", "0xe9", "save it as UTF-8"),
    whole("binary", b"\x7fELF\x02\x01\x00\x00" * 10, ":1", "U+007F is not text"),
    whole("a null byte", GOOD.replace("stdlib", "std\0lib"), ":6", "U+0000"),
    whole("an escape sequence", GOOD.replace("stdlib", "\x1b[31mred"), ":6", "U+001B"),
    whole("huge", GOOD + "# padding\n" * 10_000, "", "larger than 64 KiB"),
    whole("two documents", GOOD + "---\nsteps: 2\n", ":20", "a second document"),
    whole("deep flow", "model: " + "[" * 20_000, ":1: model" + "[0]" * 12, "nested deeper"),
    whole(
        "deep blocks", "".join("  " * i + "a:\n" for i in range(60)), ":14: a" + ".a" * 12, "nested deeper"
    ),
    whole("YAML of the future", "%YAML 3.0\n---\nsteps: 1\n", ":1", "a version of YAML"),
]

SYNTAX = [
    edit("tab indentation", "  layers: 2", "\tlayers: 2", ":2: model.layers", "tab", "indent with spaces"),
    edit("over-indented key", "batch_size: 16", "  batch_size: 16", ":9: batch_size", "indentation"),
    edit("a key amid a list", "  heads: 4", "  - heads: 4", ":4: model", "check the indentation"),
    edit("unclosed bracket", "[0.9, 0.95]", "[0.9, 0.95", ":10: optimizer.betas", "expected"),
    edit(
        "unclosed brace at the end", "{sequences: 8}", "{sequences: 8", ":19: evaluation", "close the bracket"
    ),
    edit("unclosed quote", "source: stdlib", "source: 'stdlib", ":6: data.source", "close the quotes"),
    edit("doubled comma", "floor: 0.1}", ", floor: 0.1}", ":11: schedule", "expected the node content"),
    edit("two colons", "source: stdlib", "source: a: b", ":6: data.source", "quote text"),
    edit(
        "reserved character", "source: stdlib", "source: @home", ":6: data.source", "put the value in quotes"
    ),
    edit("bad escape", "source: stdlib", r'source: "\q"', ":6: data.source", "escape character"),
    edit("beyond Unicode", "source: stdlib", r'source: "\U00110000"', ":6: data.source", "not YAML"),
    edit("half a surrogate pair", "source: stdlib", r'source: "\ud800"', ":6: data.source", "U+D800"),
    edit("null by escape", "source: stdlib", r'source: "a\0b"', ":6: data.source", "U+0000"),
    edit("unquoted glob", "source: stdlib", "source: *txt", ":6: data.source", "in quotes if it is a glob"),
    edit("anchor", "steps: 100", "steps: &n 100", ":8: steps", "`&n`", "anchor"),
    edit("alias", "batch_size: 16", "batch_size: *n", ":9: batch_size", "`*n`"),
    whole(
        "alias bomb",
        "a: &a [x, x]\n" + "".join(f"b{i}: &b{i} [*a, *a]\n" for i in range(40)),
        ":1: a",
        "`&a` is an anchor",
    ),
    edit("merge key", "  layers: 2", "  <<: {layers: 2}", ":2: model.<<", "unknown key '<<'"),
    edit("python tag", "steps: 100", "steps: !!python/name:os.getcwd ''", ":8: steps", "not for recipes"),
    edit("tag of a number", "steps: 100", 'steps: !!int "100"', ":8: steps", "not for recipes"),
    edit("own tag", "model:", "model: !model", ":1: model", "not for recipes"),
    edit("a list as key", "steps: 100", "? [steps]\n: 100", ":8", "a key must be a plain word"),
    edit("duplicate key", "batch_size: 16", "steps: 16", ":9: steps", "duplicate key 'steps'", "line 8"),
    edit(
        "duplicate in flow",
        "keep: 2",
        "every: 2",
        ":18: checkpoint.every",
        "duplicate key 'every'",
        "line 18",
    ),
]

KEYS = [
    edit("misspelt key", "  width: 64", "  widht: 64", ":3: model.widht", "unknown key 'widht'", "'width'"),
    edit("misspelt section", "optimizer:", "optimiser:", ":10: optimiser", "did you mean 'optimizer'?"),
    edit(
        "misspelt required key",
        "batch_size: 16",
        "batchsize: 16",
        ":9: batchsize",
        "did you mean 'batch_size'?",
    ),
    edit(
        "misspelt setting",
        "zero_stage",
        "zero_stgae",
        ":16: strategy.zero_stgae",
        "did you mean 'zero_stage'?",
    ),
    edit("another tool's key", "  width: 64", "  hidden_size: 64", ":3: model.hidden_size", "'width'"),
    edit("key of another section", "steps: 100", "steps: 100\nlr: 1", ":9: lr", "belongs under 'optimizer'"),
    edit("setting outside its section", "steps: 100", "zero_stage: 1", ":8: zero_stage", "under 'strategy'"),
    edit(
        "misspelt key of a rule", "clip_norm: 1.0", "scale_learning_rate: {from_bacth: 8, rule: sqrt}",
        ":10: optimizer.scale_learning_rate.from_bacth", "did you mean 'from_batch'?", "(+1 more)",
    ),
    edit("dotted key", "steps: 100", "steps: 100\ndata.source: x", ":9: data.source", "the section 'data:'"),
    edit("nothing near", "steps: 100", "steps: 100\nqqq: 1", ":9: qqq", "known keys: model, data"),
    edit("number as key", "  layers: 2", "  7: 2", ":2: model.7", "unknown key '7'"),
    edit("empty key", "  layers: 2", '  "": 2', ":2: model.", "unknown key ''"),
    edit("very long key", "  layers: 2", f"  {'k' * 900}: 2", ":2: model.kkk", "unknown key"),
    edit("adapter rank", "steps: 100", "steps: 100\nadapter: {rank: 0}", ":9: adapter.rank", "at least 1"),
    edit("adapter targets", "steps: 100", "steps: 100\nadapter: {targets: '('}", ":9: adapter.targets", "expression"),
    edit("adapter init", "steps: 100", "steps: 100\nadapter: {init: loftq:0}", ":9: adapter.init", "loftq:5"),
    edit("no steps", "steps: 100\n", "", ":1: steps", "steps is missing", "add `steps: 100`"),
    whole("no model", "steps: 1\nbatch_size: 1\n", ":1: model", "model is missing"),
    edit("two faults", "steps: 100\nbatch_size: 16", "steps: 0\nbatch_size: 0", ":8: steps", "(+1 more)"),
    edit(
        "model twice",
        "  layers: 2",
        "  preset: tiny\n  hf: gpt2",
        ":3: model.hf",
        "specified twice",
        "preset and hf",
    ),
    edit(
        "hf with dimensions", "  layers: 2", "  hf: gpt2", ":4: model.heads", "hf has its own dimensions"
    ),
    edit(
        "model without a name", "  layers: 2\n  width: 64\n  heads: 4\n", "  {}\n", ":1: model", "is missing"
    ),
    edit("dimension missing", "  layers: 2\n", "", ":1: model.layers", "layers is missing", "preset"),
    edit(
        "arguments alone", "  layers: 2", "  layers: 2\n  arguments: {a: 1}", ":3: model.arguments", "factory"
    ),
]  # fmt: skip

TYPES = [
    edit("section as text", "{every: 50, keep: 2}", "often", ":18: checkpoint", "section"),
    edit("section as list", "  layers: 2\n  width: 64\n  heads: 4", "  - 1", ":1: model", "found a list"),
    edit("strategy as text", "  zero_stage: 3\n  precision: fp32", "  zero3", ":15: strategy", "'zero3'"),
    edit("section of a word", "{sequences: 8}", "sequences:8", ":19: evaluation", "put a space after each"),
    edit("quoted number", "steps: 100", 'steps: "100"', ":8: steps", "the text '100'", "without quotes"),
    edit("underscored number", "steps: 100", "steps: 1_000", ":8: steps", "a whole number", "write 1000"),
    edit("float steps", "steps: 100", "steps: 1e3", ":8: steps", "found the number 1000.0", "write 1000"),
    edit("fractional steps", "steps: 100", "steps: 1.5", ":8: steps", "whole number", "1.5"),
    edit("boolean steps", "steps: 100", "steps: true", ":8: steps", "found true"),
    edit("steps as nothing", "steps: 100", "steps:", ":8: steps", "steps is missing"),
    edit("steps as list", "steps: 100", "steps: [100]", ":8: steps", "found a list"),
    edit("steps as section", "steps: 100", "steps: {max: 100}", ":8: steps", "found a section"),
    edit("rate as text", "3.0e-4", "small", ":10: optimizer.learning_rate", "a number", "'small'"),
    edit("yes is no boolean", "  heads: 4", "  tied: yes", ":4: model.tied", "true or false", "'yes'"),
    edit("number as source", "source: stdlib", "source: 7", ":6: data.source", "must be text", "number 7"),
    edit("empty source", "source: stdlib", 'source: ""', ":6: data.source", "must not be empty"),
    edit("betas as number", "[0.9, 0.95]", "0.9", ":10: optimizer.betas", "a list of two numbers"),
    edit("three betas", "[0.9, 0.95]", "[0.9, 0.95, 0.99]", ":10: optimizer.betas", "a list of two numbers"),
    edit("beta as text", "[0.9, 0.95]", "[0.9, high]", ":10: optimizer.betas[1]", "a number", "'high'"),
    edit("warmup as text", "warmup: 0.03", "warmup: 3%", ":11: schedule.warmup", "fraction", "'3%'"),
    edit("unknown optimizer", "name: adamw", "name: lion", ":10: optimizer.name", "must be adamw", "'lion'"),
    edit("unknown schedule", "name: cosine", "name: cosin", ":11: schedule.name", "did you mean 'cosine'?"),
    edit(
        "unknown rule", "clip_norm: 1.0", "scale_learning_rate: {from_batch: 8, rule: cubic}",
        ":10: optimizer.scale_learning_rate.rule", "must be linear or sqrt", "'cubic'",
    ),
    edit(
        "rule left out", "clip_norm: 1.0", "scale_learning_rate: {from_batch: 8}",
        ":10: optimizer.scale_learning_rate.rule", "rule is missing",
    ),
    edit(
        "rule alone", "clip_norm: 1.0", "scale_learning_rate: linear", ":10: optimizer.scale_learning_rate",
        "a section of keys", "'linear'",
    ),
    edit("decay as text", "warmup: 0.03", "decay: 10%", ":11: schedule.decay", "fraction", "'10%'"),
    edit("start from a number", "every: 50", "start_from: 50", ":18: checkpoint.start_from", "must be text"),
    edit("bad factory", "  layers: 2", "  factory: my model", ":2: model.factory", "package.module:function"),
    edit(
        "argument no word", "  layers: 2\n  width: 64\n  heads: 4", "  factory: a:b\n  arguments: {if: 1}",
        ":3: model.arguments.if", "Python identifier",
    ),
    edit(
        "argument a list", "  layers: 2\n  width: 64\n  heads: 4", "  factory: a:b\n  arguments: {n: [1]}",
        ":3: model.arguments.n", "found a list",
    ),
    edit("stage as text", "zero_stage: 3", "zero_stage: three", ":16: strategy.zero_stage", "an integer"),
    edit("unknown precision", "precision: fp32", "precision: bf61", ":17: strategy.precision", "'bf16'?"),
    edit(
        "a number that its form does not take",
        "precision: fp32",
        "recomputed: every:1",
        ":17: strategy.recomputed",
        "'every:1' is not every:K with a whole number K ≥ 2",
    ),
    edit(
        "no value and no form",
        "precision: fp32",
        "recomputed: sqr",
        ":17: strategy.recomputed",
        "'sqr' is not one of none, sqrt, every:K",
        "did you mean 'sqrt'?",
    ),
    edit(
        "a form with spaces is a mapping",
        "precision: fp32",
        "recomputed: {every: 2}",
        ":17: strategy.recomputed",
        "expected a word",
    ),
]  # fmt: skip

LIMITS = [
    edit("no steps to take", "steps: 100", "steps: 0", ":8: steps", "at least 1", "number 0"),
    edit("negative batch", "batch_size: 16", "batch_size: -16", ":9: batch_size", "at least 1"),
    edit("absurd steps", "steps: 100", "steps: 10000000000", ":8: steps", "at most 1000000000"),
    edit("endless number", "steps: 100", "steps: " + "9" * 5000, ":8: steps", "a number of 5000 characters"),
    edit("rate not a number", "3.0e-4", ".nan", ":10: optimizer.learning_rate", "finite", "nan"),
    edit("rate infinite", "3.0e-4", ".inf", ":10: optimizer.learning_rate", "finite"),
    edit("rate overflows", "3.0e-4", "1e999", ":10: optimizer.learning_rate", "finite"),
    edit("rate zero", "3.0e-4", "0.0", ":10: optimizer.learning_rate", "greater than 0"),
    edit("rate negative", "3.0e-4", "-3e-4", ":10: optimizer.learning_rate", "greater than 0"),
    edit("rate absurd", "3.0e-4", "3.0e+4", ":10: optimizer.learning_rate", "at most 100"),
    edit("beta of one", "[0.9, 0.95]", "[0.9, 1.0]", ":10: optimizer.betas[1]", "less than 1"),
    edit("clip at zero", "clip_norm: 1.0", "clip_norm: 0", ":10: optimizer.clip_norm", "greater than 0"),
    edit("warmup of all", "warmup: 0.03", "warmup: 1.0", ":11: schedule.warmup", "below 1"),
    edit("decay of all", "cosine, warmup: 0.03", "wsd, decay: 1.0", ":11: schedule.decay", "below 1"),
    edit("decay negative", "cosine, warmup: 0.03", "wsd, decay: -1", ":11: schedule.decay", "fraction"),
    edit(
        "batch of none", "clip_norm: 1.0", "scale_learning_rate: {from_batch: 0, rule: sqrt}",
        ":10: optimizer.scale_learning_rate.from_batch", "at least 1",
    ),
    edit("warmup not a number", "warmup: 0.03", "warmup: .nan", ":11: schedule.warmup", "fraction"),
    edit("warmup negative", "warmup: 0.03", "warmup: -5", ":11: schedule.warmup", "fraction"),
    edit("floor above the peak", "floor: 0.1", "floor: 1.5", ":11: schedule.floor", "at most 1"),
    edit("everything held out", "  source: stdlib", "  held_out: 1.0", ":6: data.held_out", "less than 1"),
    edit("no tokens", "sequence_length: 128", "sequence_length: 0", ":7: data.sequence_length", "at least 1"),
    edit("keep none", "keep: 2", "keep: 0", ":18: checkpoint.keep", "at least 1"),
    edit(
        "no devices",
        "devices_per_node: 2",
        "devices_per_node: 0",
        ":14: cluster.devices_per_node",
        "at least 1",
    ),
    edit("no layers", "layers: 2", "layers: 0", ":2: model.layers", "at least 1"),
    edit("seed negative", "steps: 100", "seed: -1\nsteps: 100", ":8: seed", "at least 0"),
    edit("seed too large", "steps: 100", f"seed: {2**63}\nsteps: 100", ":8: seed", "less than"),
    edit(
        "stage four",
        "zero_stage: 3",
        "zero_stage: 4",
        ":16: strategy.zero_stage",
        "4 is not one of 0, 1, 2, 3",
    ),
]  # fmt: skip

TOGETHER = [
    edit("heads do not divide", "heads: 4", "heads: 5", ":4: model.heads", "64 is not a multiple of 5"),
    edit("kv_heads do not divide", "heads: 4", "heads: 4\n  kv_heads: 3", ":5: model.kv_heads", "4 is not"),
    edit("odd head width", "width: 64", "width: 12", ":4: model.heads", "even head dimension"),
    edit("positions run out", "heads: 4", "heads: 4\n  context: 64", ":8: data.sequence_length", "64"),
    edit("bytes need 256", "heads: 4", "heads: 4\n  vocab: 100", ":5: model.vocab", "256"),
    edit(
        "LoftQ of nothing", "steps: 100", "steps: 100\nadapter: {init: loftq}", ":9: adapter.init", "quantize: nf4"
    ),
    edit(
        "two starts", "steps: 100", "steps: 100\nadapter: {init: 'loftq:5', quantize: nf4, start_from: there}",
        ":9: adapter.init", "keep one of init and start_from",
    ),
    edit("decay without wsd", "warmup: 0.03", "decay: 5", ":11: schedule.decay", "only wsd uses", "name: wsd"),
    edit(
        "shape without wsd", "warmup: 0.03", "decay_shape: linear", ":11: schedule.decay_shape",
        "only wsd uses decay_shape", "name: wsd",
    ),
    edit(
        "schedule too long", "cosine, warmup: 0.03", "wsd, warmup: 40, decay: 61", ":11: schedule.decay",
        "longer than the run", "40 steps of warmup and 61 of decay are more than 100",
    ),
    edit("all warmup", "warmup: 0.03", "warmup: 100", ":11: schedule.warmup", "no steps", "100 steps of warmup"),
    override("all warmup by steps", ("schedule.name=linear", "schedule.warmup=20", "steps=20"), "command line: steps"),
    override(
        "run too short", ("schedule.name=wsd", "schedule.decay=20", "steps=20"), "command line: steps",
        "1 steps of warmup and 20 of decay are more than 20",
    ),
    edit(
        "rule ends before the batch", "clip_norm: 1.0", "scale_learning_rate: {from_batch: 1, rule: sqrt}",
        ":10: optimizer.scale_learning_rate", "k (1 - beta) is 1.6", "the largest batch_size that works is 9",
    ),
    override(
        "batch beyond the rule",
        ("optimizer.scale_learning_rate={from_batch: 4, rule: sqrt}", "batch_size=40"),
        "command line: batch_size", "the largest batch_size that works is 39",
    ),
    edit("unknown preset", "layers: 2", "preset: lama-3-8b", ":2: model.preset", "unknown", "llama-3-8b"),
    edit("unknown device", "device: cpu", "device: h1000", ":13: cluster.device", "unknown device", "H100"),
    edit("cluster twice", "device: cpu", "preset: 8xH100-80GB", ":14: cluster.devices_per_node", "keep one"),
    edit("section twice", "evaluation:", "checkpoint:", ":19: checkpoint", "duplicate key", "line 18"),
    override(
        "no held-out data", ("data.held_out=0", "evaluation.every=5"), "command line: evaluation.every",
        "there is no validation data",
    ),
]  # fmt: skip

LINE = "command line"
OVERRIDES = [
    override("no equals", "steps", LINE, "'steps' is not an override", "section.key=value"),
    override("no key", "=5", LINE, "is not an override"),
    override("two dots", "data..source=x", LINE, "is not an override"),
    override("a flag", "--steps=5", LINE, "is not an override"),
    override("no value", "steps=", f"{LINE}: steps", "no value", "steps=null"),
    override("unknown section", "modle.width=3", f"{LINE}: modle", "did you mean 'model'?"),
    override("unknown key", "model.widht=3", f"{LINE}: model.widht", "did you mean 'width'?"),
    override("unknown setting", "strategy.zero=3", f"{LINE}: strategy.zero", "did you mean 'zero_stage'?"),
    override("text for a number", "steps=many", f"{LINE}: steps", "found the text 'many'"),
    override("number in quotes", "steps='100'", f"{LINE}: steps", "without quotes"),
    override("infinite rate", "optimizer.learning_rate=.inf", f"{LINE}: optimizer.learning_rate", "finite"),
    override("unset a required key", "steps=null", f"{LINE}: steps", "steps is missing"),
    override("through a number", "steps.max=5", f"{LINE}: steps.max", "steps has no keys", "steps=..."),
    override("into a list", "optimizer.betas.1=0.9", f"{LINE}: optimizer.betas.1", "it is a list"),
    override("inside a list", "optimizer.betas=[0.9, 2]", f"{LINE}: optimizer.betas[1]", "less than 1"),
    override("inside a section", "checkpoint={keep: 0}", f"{LINE}: checkpoint.keep", "at least 1"),
    override("bracket left open", "optimizer.betas=[0.9", f"{LINE}: optimizer.betas", "close the bracket"),
    override("twice in braces", "checkpoint={keep: 1, keep: 2}", f"{LINE}: checkpoint", "duplicate key"),
    override("control character", "data.source=a\x1bb", f"{LINE}: data.source", "U+001B"),
    override("no such preset", "cluster.preset=8xH1000", f"{LINE}: cluster.preset", "H100"),
    override(
        "breaks the heads", ("model.preset=tiny", "model.width=66"), f"{LINE}: model.width", "66 is not"
    ),
    override("file's fault first", ("checkpoint.keep=0", "steps=0"), f"{LINE}: checkpoint.keep", "(+1 more)"),
    override("huge text", "steps=" + "x" * 100_000, f"{LINE}: steps", "found the text 'xxx"),
    override("section as word", "model=tiny", f"{LINE}: model", "a section of keys"),
]  # fmt: skip

CASES = [*FILES, *SYNTAX, *KEYS, *TYPES, *LIMITS, *TOGETHER, *OVERRIDES]
# Of Python and C functions, as how long they take depends on what else the machine does.
# 20,000 open brackets take 2.5 million, everything else less than a tenth of that. Seconds: benchmarks/first_error.py.
MOST_CALLS = 3_000_000

# Loads every case and prints, as JSON, the line or the trace of each, and how many calls it took.
CHILD = """
import json, sys, traceback
from pathlib import Path
from shardwise.core.errors import ShardwiseError
from shardwise.recipe.load import load_recipe
from shardwise.core.strategy import Form, Setting

settings = [
    Setting("zero_stage", 0, "", kind=int, choices=(0, 1, 2, 3)),
    Setting("precision", "fp32", "", choices=("fp32", "bf16")),
    Setting("micro_batch_size", 1, "", kind=int, minimum=1),
    Setting("recomputed", "none", "", choices=("none", "sqrt"), forms=(Form("every", "K", 2, 2),)),
]
results, calls = [], 0

def count(frame, event, argument):
    global calls
    calls += event in ("call", "c_call")

for folder, overrides in json.load(sys.stdin):
    calls, report = 0, {}
    try:
        sys.setprofile(count)
        load_recipe(Path(folder), overrides, settings)
    except ShardwiseError as error:
        report = {"line": error.line(), "kind": type(error).__name__, "code": error.exit_code}
    except BaseException:
        report = {"trace": traceback.format_exc()}
    sys.setprofile(None)
    report["calls"] = calls
    report["torch"] = sorted({"torch", "numpy", "transformers"} & set(sys.modules))
    results.append(report)
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    """What loading each case gave, by the name of the case."""
    folder = tmp_path_factory.mktemp("malformed")
    requests = []
    for index, case in enumerate(CASES):
        (folder / f"{index}.yaml").write_bytes(case.content())
        requests.append((f"{index}.yaml", case.overrides))
    child = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=json.dumps(requests),
        capture_output=True,
        text=True,
        check=True,
        cwd=folder,
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert child.stderr == ""
    return {case.name: report for case, report in zip(CASES, json.loads(child.stdout), strict=True)}


def test_the_table_has_no_row_twice() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 75


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_line_with_place_and_reason(case: Case, reports: dict[str, dict[str, object]]) -> None:
    report = reports[case.name]
    assert "trace" not in report, report["trace"]
    assert "line" in report, "it was accepted"
    line = str(report["line"])
    where = case.where
    if not where.startswith("command line"):
        where = f"{CASES.index(case)}.yaml{where}"
    assert f" ({where}" in line
    if "kkk" not in where:
        assert f" ({where})" in line
    for piece in case.says:
        assert piece in line
    assert line.startswith("error: ") and line.isprintable() and len(line) <= 300
    assert (report["kind"], report["code"]) == ("RecipeError", 2)
    assert report["torch"] == []
    assert int(str(report["calls"])) < MOST_CALLS
