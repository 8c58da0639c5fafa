"""Reads the imported symbols of a macOS extension, on a machine whose nm reads only ELF files."""

import struct
from pathlib import Path

MAGIC = b"\xcf\xfa\xed\xfe"  # 64 bits, little endian
_SYMBOL_TABLE = 2  # LC_SYMTAB
_EXTERNAL, _DEBUGGING, _TYPE = 0x01, 0xE0, 0x0E  # bits of a symbol's type, which is 0 if it is defined elsewhere


def is_one(extension: Path) -> bool:
    with extension.open("rb") as file:
        return file.read(4) == MAGIC


def undefined_symbols(extension: Path) -> list[str]:
    """The names as in the file: mangled, with a leading underscore."""
    content = extension.read_bytes()
    (commands,) = struct.unpack_from("<I", content, 16)
    place, found = 32, []
    for _ in range(commands):
        kind, size = struct.unpack_from("<II", content, place)
        if kind == _SYMBOL_TABLE:
            symbols, count, strings, _ = struct.unpack_from("<4I", content, place + 8)
            for number in range(count):
                name, bits = struct.unpack_from("<IB", content, symbols + 16 * number)
                if bits & _EXTERNAL and not bits & (_DEBUGGING | _TYPE):
                    start = strings + name
                    found.append(content[start : content.index(b"\0", start)].decode())
        place += size
    return found
