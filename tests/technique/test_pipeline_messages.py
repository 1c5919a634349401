"""Messages of a pipeline: each is asked for in the order in which it is sent, and let go of when it has arrived."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardwise.core.pipeline.messages import Message, Post, posts
from shardwise.core.pipeline.schedule import Action, Order, orders

CASES = [
    (schedule, ranks, each, count)
    for schedule in ("naive", "gpipe", "1f1b", "interleaved", "zero_bubble")
    for ranks in (2, 3, 4)
    for each in ((2, 3) if schedule == "interleaved" else (1,))
    for count in (1, 2, 5, 8)
]


def steps(order: Order, post: Post) -> Iterator[tuple[str, Message]]:
    """What a rank does with its messages, as engine/pipeline/p2p.py does it."""
    asked = {key: list(messages) for key, messages in post.asked.items()}
    coming: set[Message] = set()
    for action in order:
        if action in post.received:
            sender, message = post.received[action]
            queue = asked[sender, message.forward, message.wraps]
            while message not in coming:
                coming.add(queue[0])
                yield "ask", queue.pop(0)
            yield "need", message
            yield from (("let go", gone) for gone in post.arrived[action])
        if action in post.sent:
            yield "send", post.sent[action]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_nobody_waits_for_anything_that_does_not_come(case: tuple[str, int, int, int]) -> None:
    """Every rank gets to its end though it waits, at once, where it lets go; all is sent, asked for and needed once."""
    schedule, ranks, each, count = case
    post = posts(schedule, ranks, each, count)
    todo = [list(steps(o, p)) for o, p in zip(orders(schedule, ranks, each, count), post, strict=True)]
    sent: set[Message] = set()
    asked: set[Message] = set()
    moved = True
    while moved:
        moved = False
        for rank in todo:
            while rank:
                action, message = rank[0]
                if action == "need" and message not in sent:
                    break
                if action == "let go" and message not in asked:
                    raise AssertionError(f"{message} had not arrived when it was let go of")
                {"ask": asked, "send": sent}.get(action, set()).add(message)
                rank.pop(0)
                moved = True
    assert not any(todo)
    assert sent == asked
    assert len(sent) == 2 * count * (ranks * each - 1)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_communicator_that_does_one_thing_after_the_other_is_no_deadlock(
    case: tuple[str, int, int, int],
) -> None:
    """NCCL's order: on each channel a rank's sends and receives are done in the order in which they were asked for."""
    schedule, ranks, each, count = case
    post = posts(schedule, ranks, each, count)
    queues: dict[tuple[int, bool, bool], list[tuple[str, Message]]] = {}
    before: dict[tuple[int, str, Message], list[Message]] = {}
    for rank, order in enumerate(orders(schedule, ranks, each, count)):
        needed: list[Message] = []  # by the action before the send
        for action, message in steps(order, post[rank]):
            if action == "need":
                needed.append(message)
            elif action != "let go":
                before[rank, action, message] = list(needed) if action == "send" else []
                queues.setdefault((rank, message.forward, message.wraps), []).append((action, message))
    arrived: set[Message] = set()
    moved = True
    while moved:
        moved = False
        heads = {(rank, *queue[0]) for (rank, _, _), queue in queues.items() if queue}
        for key, queue in queues.items():
            if not queue:
                continue
            action, message = queue[0]
            other = "ask" if action == "send" else "send"
            peers = [r for r in range(ranks) if r != key[0] and (r, other, message) in heads]
            sender = key[0] if action == "send" else next(iter(peers), None)
            if peers and sender is not None and set(before[sender, "send", message]) <= arrived:
                peer = peers[0]
                queue.pop(0)
                queues[peer, message.forward, message.wraps].pop(0)
                arrived.add(message)
                moved = True
                break
    assert not any(queues.values())


def test_a_result_is_let_go_of_when_its_gradient_is_there_at_the_latest() -> None:
    for rank, post in enumerate(posts("1f1b", 4, 1, 8)[:3]):
        gone: list[Action] = []
        for action, messages in post.arrived.items():
            gone += [message.of for message in messages]
            if action.kind == "B":
                assert Action("F", rank, action.micro_batch) in gone
        assert sum(action.kind == "F" for action in gone) == 8
