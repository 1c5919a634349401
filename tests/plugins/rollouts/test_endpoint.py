"""Completions by a server: exact tokens, no request twice, weights for its other distribution; faults are one line."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.core.errors import DataError, RecipeError
from shardwise.dryrun.run import dry_run
from shardwise.hardware.cluster import cluster_of
from shardwise.model.open import blueprint_of
from shardwise.plugins.rollouts import endpoint
from shardwise.plugins.rollouts.endpoint import Endpoint
from shardwise.technique import strategy_from
from tests.harness.plans import NOTHING_TO_SEARCH
from tests.harness.pool import Pool
from tests.plugins.rollouts.rollout_runs import EXACT, ManyEnds, gradients, prompts, rollout_recipe, tables
from tests.plugins.rollouts.test_objectives import completions, plain_log_probabilities, plain_model
from tests.plugins.rollouts.test_training import SETTINGS, UNIT, curve, train

Choice = dict[str, Any]


def sampled(request: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Bytes and made-up log-probabilities that follow from the seed."""
    chance, ids = random.Random(request["seed"]), list[int]()
    while len(ids) < request["max_tokens"] and (not ids or ids[-1] not in request["stop_token_ids"]):
        ids.append(chance.randrange(128))
    return ids, [-chance.random() * 8 for _ in ids]


def with_ids(request: dict[str, Any]) -> Choice:
    ids, logs = sampled(request)
    return {"text": "?", "token_ids": ids, "logprobs": {"tokens": ["?"] * len(ids), "token_logprobs": logs}}


def with_names(request: dict[str, Any]) -> Choice:
    ids, logs = sampled(request)
    return {"logprobs": {"tokens": [f"token_id:{token}" for token in ids], "token_logprobs": logs}}


class Server:
    """Answers completions on a free port of this machine. ``answer`` may be replaced."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.answer: Callable[[dict[str, Any]], Choice] = with_ids
        self.fails_after = -1
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append({"path": self.path, **request})
                broken = 0 <= outer.fails_after < len(outer.requests)
                body = b"no memory" if broken else json.dumps({"choices": [outer.answer(request)]}).encode()
                with suppress(OSError):  # the client waits no longer
                    self.send_response(500 if broken else 200)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)

            def log_message(self, *_: Any) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.http.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.http.shutdown()
    server.http.server_close()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prompts(tmp_path_factory.mktemp("prompts"))


LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {"zero_stage": 3}),
    (2, {"tensor_parallel": 2}),
]


def test_the_tokens_are_the_servers_and_none_is_asked_twice(pool: Pool, source: Path, server: Server) -> None:
    recipe = rollout_recipe(source, "grpo", {"endpoint": server.url, "endpoint_model": "m"})
    made = []
    for world, settings in LAYOUTS:
        server.requests.clear()
        made.append(pool.run(world, tables, recipe, {**EXACT, **settings})[0])
        assert len({request["seed"] for request in server.requests}) == len(server.requests) == 12
    fixed = {
        "path": "/v1/completions",
        "model": "m",
        "top_k": -1,
        "top_p": 1.0,
        "stop_token_ids": [*range(16)],
    }
    assert all(fixed.items() <= request.items() for request in server.requests)
    expected = {(tuple(r["prompt"]), *map(tuple, sampled(r))) for r in server.requests}
    seen = set()
    for row, ids, begin in completions(made[0]):
        logs = made[0]["sampled"][row, begin - 1 : len(ids) - 1]
        seen.add((tuple(ids[:begin]), tuple(ids[begin:]), tuple(logs.tolist())))
    rounded = {(p, ids, tuple(torch.tensor(logs).tolist())) for p, ids, logs in expected}
    assert seen == rounded
    for other in made[1:]:
        assert all(torch.equal(table, other[name]) for name, table in made[0].items())


def test_ids_may_be_names_of_tokens(source: Path, server: Server) -> None:
    asked = ([[65, 66]], [(0, 1)], ManyEnds())
    [first] = Endpoint(server.url, None, 6, 1.0).completions(*asked)
    server.answer = with_names
    [second] = Endpoint(server.url, None, 6, 1.0).completions(*asked)
    assert first.tokens == second.tokens
    assert torch.equal(first.log_probabilities, second.log_probabilities)


def test_tokens_are_weighted_by_the_truncated_ratio(pool: Pool, source: Path, server: Server) -> None:
    """Loss and gradients equal plain PyTorch, from one completion at a time."""
    recipe = rollout_recipe(source, "rloo", {"endpoint": server.url})
    made, loss, grads = pool.run(1, gradients, recipe, {"micro_batch_size": 5})[0]
    blueprint, model = plain_model(recipe)
    rewards = made["rewards"][:, 0].tolist()
    total, tokens, cut = torch.zeros((), dtype=torch.float64), 0, 0
    for row, ids, begin in completions(made):
        logs = plain_log_probabilities(blueprint, model, ids, begin)
        served = made["sampled"][row, begin - 1 : len(ids) - 1].double()
        ratio = (logs.detach() - served).exp()
        cut += int((ratio > 2).sum())
        group = rewards[row // 4 * 4 : row // 4 * 4 + 4]
        advantage = torch.tensor(rewards[row] - (sum(group) - rewards[row]) / 3).double()
        total = total - (ratio.clamp(max=2) * advantage.float() * (logs - logs.detach()).exp()).sum()
        tokens += len(logs)
    assert 0 < cut < tokens
    total = total / tokens
    assert loss == pytest.approx(total.item(), rel=1e-6)
    total.backward()  # type: ignore[no-untyped-call]
    for key, parameter in model.named_parameters():
        assert torch.allclose(grads[key], parameter.grad, rtol=1e-5, atol=1e-8), key


def without_ids(request: dict[str, Any]) -> Choice:
    return {"logprobs": {"tokens": ["a", "b"], "token_logprobs": [-1.0, -1.0]}}


def cut_short(request: dict[str, Any]) -> Choice:
    return {"token_ids": [70], "finish_reason": "stop", "logprobs": {"token_logprobs": [-1.0]}}


def without_a_log(request: dict[str, Any]) -> Choice:
    return {"token_ids": [70, 3], "logprobs": {"token_logprobs": [-1.0]}}


FAULTS = [
    (without_ids, "returns no token ids .*: serve with vLLM.*text is not tokenized again"),
    (cut_short, "cut short .*: it has 1 of 6 tokens, and none of .* at its end"),
    (without_a_log, "wrong answer .*: ValueError: 2 ids and 1 log-probabilities of at most 6"),
    (
        lambda request: {**with_ids(request), "prompt_token_ids": [1, 65, 66]},
        "the prompt has other tokens there",
    ),
    (lambda request: {"token_ids": [256, 3], "logprobs": {"token_logprobs": [-1, -1]}}, "wrong answer"),
    (lambda request: {"text": "a"}, "wrong answer .*: KeyError: 'logprobs'"),
]


@pytest.mark.parametrize(("answer", "line"), FAULTS)
def test_an_answer_without_exact_tokens_is_refused(answer: Any, line: str, server: Server) -> None:
    server.answer = answer
    with pytest.raises(DataError, match=line) as caught:
        Endpoint(server.url, None, 6, 1.0).completions([[65, 66]], [(0, 1)], ManyEnds())
    assert caught.value.where == f"objective.endpoint: {server.url}"


def test_a_server_that_does_not_answer_is_named(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ([[65, 66]], [(0, 1)], ManyEnds())
    done = threading.Event()
    server.answer = lambda request: {"waited": done.wait(5)}
    monkeypatch.setattr(endpoint, "ANSWER_SECONDS", 0.1)
    with pytest.raises(DataError, match=r"does not answer .*: TimeoutError: timed out"):
        Endpoint(server.url, None, 6, 1.0).completions(*asked)
    done.set()
    with pytest.raises(DataError, match=r"does not answer .*: URLError: .*refused"):
        Endpoint("http://127.0.0.1:1/v1", None, 6, 1.0).completions(*asked)


@pytest.mark.long
def test_a_run_goes_on_after_a_fault_of_the_server(
    pool: Pool, source: Path, server: Server, tmp_path: Path
) -> None:
    run = {
        "cluster": {"device": "cpu", "devices_per_node": 2},
        "checkpoint": {"every": UNIT},
        "steps": 2 * UNIT,
        "strategy": NOTHING_TO_SEARCH | SETTINGS,
    }
    recipe = rollout_recipe(source, "grpo", {"endpoint": server.url}, **run)
    assert train(pool, recipe, tmp_path / "whole")[0][0] == "finished"
    server.requests.clear()
    server.fails_after = 12 * (UNIT + 1)
    with pytest.raises(DataError, match=r"does not answer .*: HTTP 500: no memory"):
        train(pool, recipe, tmp_path / "run")
    server.fails_after = -1
    assert train(pool, recipe, tmp_path / "run")[0][0] == "finished"
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")


def test_the_plan_has_no_generation_and_says_so(source: Path) -> None:
    recipe = rollout_recipe(source, "grpo", {"endpoint": "http://localhost:8000/v1", "beta": 0.1})
    cluster, blueprint = cluster_of(recipe.cluster), blueprint_of(recipe)
    blueprint.minimises.warm_up(None)  # type: ignore[attr-defined]  # it samples nothing
    run = dry_run(recipe, blueprint, strategy_from(EXACT), cluster)
    local = rollout_recipe(source, "grpo", {"beta": 0.1})
    own = dry_run(local, blueprint_of(local), strategy_from(EXACT), cluster)
    flops = [sum(k.flops * k.calls for k in r.cost.kernels if k.phase == "rollout") for r in (run, own)]
    forward = sum(k.flops * k.calls for k in run.cost.kernels if k.phase == "forward")
    assert 0 < flops[0] <= forward < flops[1]  # the reference's pass alone
    assert any("whose weights do not follow training" in note for note in run.hints.notes)


@pytest.mark.parametrize(
    ("objective", "values", "line"),
    [
        ({"endpoint": "localhost:8000"}, {}, "endpoint is not a URL .*: it is localhost:8000"),
        ({"endpoint_model": "m"}, {}, "endpoint_model cannot be set here .*: there is no endpoint"),
        (
            {"endpoint": "http://a/v1"},
            {"evaluation": {"sets": {"a": "b"}}},
            "sets cannot be set here .* follow",
        ),
    ],
)
def test_keys_without_a_meaning_are_refused(
    source: Path, objective: dict[str, Any], values: dict[str, Any], line: str
) -> None:
    with pytest.raises(RecipeError, match=line):
        rollout_recipe(source, "grpo", objective, **values)
