"""What decoders raise -> one error that names the media input, and holds none of its bytes. Knows no decoder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from mm_plugin.errors import MediaError, MMPluginError


@contextlib.contextmanager
def decoding(
    path: str,
    what: str,
    *,
    errors: Callable[[], tuple[type[Exception], ...]],
    translate: Callable[[Exception], MMPluginError | None] = lambda error: None,  # noqa: ARG005
) -> Iterator[None]:
    """Turn a decoder's errors into a `MediaError` with a path.

    A `MediaError` from the inside that has no path yet gets this one; every other error of this package passes unchanged.

    Args:
        path: where the media input stands in the request, for messages.
        what: what is decoded, for messages: "image", "video" or "audio".
        errors: gives the classes that the decoder raises on corrupted input; called only once something was raised.
        translate: a more precise error for some of them, or None.
    """
    try:
        yield
    except MediaError as error:
        if error.path is not None:
            raise
        raise MediaError(f"{path}: {error.message}", path=path, reason=error.reason) from None
    except MMPluginError:
        raise
    except Exception as error:
        if not isinstance(error, errors()):
            raise
        precise = translate(error)
        if precise is not None:
            try:
                raise precise from error
            finally:
                del precise  # this frame is in its traceback; a cycle would keep the media input alive
        raise MediaError(
            f"{path}: the {what} is corrupted ({type(error).__name__})", path=path, reason="broken"
        ) from error
