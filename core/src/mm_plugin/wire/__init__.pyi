from .frames import MAX_BYTES, VERSION, decode, encode, pack, same, unpack

__all__ = ["MAX_BYTES", "VERSION", "decode", "encode", "pack", "same", "unpack"]
