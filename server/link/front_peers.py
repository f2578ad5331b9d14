"""A stream from this front to one of another node, at the port that the other front has for ranks.

The other end is `ranks`, which checks the token and, with a cluster key, every message (`seal`).
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from server.link.messages import METHOD, OPTIONS, SERVICE, decode, encode
from server.link.rank_link import Handshake
from server.link.seal import NONCE_KEY, SAME_KEY, Seal, SealError

# What gRPC raises on a stream that breaks, and on one that is known to have ended.
_BROKEN = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)


class PeerLostError(ConnectionError):
    """The other front does not answer, or its stream has ended. The message has the reason."""


class FrontPeer:
    """This end of a stream to another front. One task may send while another one receives."""

    def __init__(self, call: Any, seal: Seal) -> None:
        self._call, self._seal = call, seal

    async def send(self, message: object) -> None:
        """Send a message.

        Raises:
            PeerLostError: The stream has ended.
        """
        try:
            await self._call.write(self._seal.seal(encode(message)))
        except _BROKEN as error:
            raise PeerLostError(_why(error)) from error

    async def received(self) -> AsyncIterator[Any]:
        """Yield the other front's messages until it ends the stream.

        Raises:
            PeerLostError: The stream broke, or was refused.
        """
        while True:
            try:
                message = await self._call.read()
                if message is grpc.aio.EOF:
                    return
                content = self._seal.open(message)
            except (*_BROKEN, SealError) as error:
                raise PeerLostError(_why(error)) from error
            yield decode(content)

    async def finish(self) -> None:
        """Send no more messages, and wait until the other front has taken all of them and ends the stream.

        Raises:
            PeerLostError: The stream broke, or was refused.
        """
        try:
            await self._call.done_writing()
        except _BROKEN as error:
            raise PeerLostError(_why(error)) from error
        async for _ in self.received():
            pass


@contextlib.asynccontextmanager
async def stream_to(
    address: str, token: str, first: object, *, cluster_key: bytes | None
) -> AsyncIterator[FrontPeer]:
    """Open a stream with its first message, and end it afterwards.

    Raises:
        PeerLostError: The other front does not answer.
    """
    async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
        handshake, nonce = Handshake(cluster_key), ""
        call = channel.stream_stream(f"/{SERVICE}/{METHOD}")(metadata=handshake.metadata(token))
        try:
            if cluster_key is not None:  # the other end sends its nonce first
                nonce = str(dict(await call.initial_metadata() or ()).get(NONCE_KEY, ""))
                if not nonce:
                    raise PeerLostError(f"the program that answers there has no cluster key; {SAME_KEY}")
            peer = FrontPeer(call, handshake.seal_with(nonce))
            await peer.send(first)
            yield peer
        except _BROKEN as error:
            raise PeerLostError(_why(error)) from error
        finally:
            call.cancel()


def _why(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.details() or 'no reason given'} ({error.code().name})"
    return str(error) or type(error).__name__
