"""Point-to-point messages between the ranks of a pipeline in one step. core/pipeline/messages.py says who sends what.

Each direction has its own communicator, and so has the link from the last rank to the first. So a send never waits for
a receive without a matching send. On NCCL, which serves one operation of a communicator after the other, that would be
a deadlock. All sends and receives are asynchronous. The host does not wait for them on an accelerator; on the CPU it
waits for the next message that it needs. ``batch_isend_irecv`` would make independent messages wait for the later one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.core.pipeline.messages import Message, Post
from shardwise.core.pipeline.schedule import Action
from shardwise.technique.pipeline.place import Channel


class Mail:
    """One rank's messages of one step. ``post`` says which there are; hidden states are of ``dtype``."""

    def __init__(
        self,
        post: Post,
        channels: Mapping[Channel, dist.ProcessGroup],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._post = post
        self._channels = channels
        self._dtype = dtype
        self._device = device
        # By sender and channel: messages that are not asked for yet, in the order in which they are sent.
        self._upcoming = {key: list(messages) for key, messages in post.asked.items()}
        self._arriving: dict[Message, tuple[Tensor, Any]] = {}
        self._leaving: dict[Message, tuple[Tensor, Any]] = {}

    def receive(self, action: Action, shape: tuple[int, ...]) -> Tensor:
        """What ``action`` needs from another rank."""
        sender, message = self._post.received[action]
        upcoming = self._upcoming[sender, message.forward, message.wraps]
        # Receives of a channel match its sends by order, so earlier messages are asked for first.
        while message not in self._arriving:
            following = upcoming.pop(0)
            buffer = torch.empty(shape, dtype=self._dtype, device=self._device)
            group = self._channels[following.forward, following.wraps]
            self._arriving[following] = buffer, dist.irecv(buffer, group=group, group_src=sender)
        buffer, work = self._arriving.pop(message)
        wait_for(work)
        self._let_go(action)
        return buffer

    def send(self, action: Action, tensor: Tensor) -> None:
        """Send what ``action`` has yielded, if anybody waits for it."""
        message = self._post.sent.get(action)
        if message is not None:
            tensor = tensor.detach().contiguous()
            group = self._channels[message.forward, message.wraps]
            # Kept until it has been received: the transfer reads its memory.
            self._leaving[message] = tensor, dist.isend(tensor, group=group, group_dst=message.to)

    def _let_go(self, action: Action) -> None:
        """Free sent tensors that have been received."""
        for message in self._post.arrived[action]:
            wait_for(self._leaving.pop(message)[1])

    def close(self) -> None:
        """The step is over: everything has been received or soon will be."""
        for _, work in self._leaving.values():
            wait_for(work)
        self._leaving.clear()


def wait_for(work: Any) -> None:
    if work is not None:  # of a message to oneself there is none
        work.wait()
