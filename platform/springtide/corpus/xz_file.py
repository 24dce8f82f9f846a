"""A file that ``xz`` has compressed, decompressed as it is read and in bounded memory."""

from __future__ import annotations

import io
import lzma
from typing import IO, Any

_READ_BYTES = 2**16
_DECODER_BYTES = 128 * 2**20
"""Memory of a decoder [bytes]: ``xz -9`` needs 65 MiB, and a hostile header may ask for 4 GiB."""


class XzFile(io.RawIOBase):
    """The content of an ``.xz`` file, also of several streams that follow one another, with zeros between them.

    Reads raise a plain OSError, as pyarrow's decompressors do, if the file is damaged or cut.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._decoder = _decoder()
        self._has_begun = False
        """Whether the stream of the decoder has begun."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Read into ``buffer`` and return the number of bytes, 0 at the end."""
        most = len(buffer)
        while most:
            if self._decoder.eof:
                rest = self._decoder.unused_data
                self._decoder, self._has_begun = _decoder(), False
            else:
                rest = self._file.read(_READ_BYTES) if self._decoder.needs_input else b""
                if not rest and self._decoder.needs_input:
                    if self._has_begun:
                        raise OSError("the xz file is cut, or is none")
                    return 0
            if not self._has_begun:
                rest = rest.lstrip(b"\0")  # padding
                self._has_begun = bool(rest)
            try:
                data = self._decoder.decompress(rest, most)
            except lzma.LZMAError as error:
                raise OSError(f"xz: {error}") from None
            if data:
                buffer[: len(data)] = data
                return len(data)
        return 0

    def close(self) -> None:
        """Close the compressed file, too."""
        self._file.close()
        super().close()


def _decoder() -> lzma.LZMADecompressor:
    return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_DECODER_BYTES)
