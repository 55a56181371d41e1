"""Films of a cache: pictures of the radix tree, step by step, and the page that plays them.

    with Film(cache) as film:                      draws while somebody drives the cache
        ...
    film.save("film.html", title="My chats")       one page, nothing outside it, nothing to install

    with Recording(llm.cache) as recording:        only notes the calls: what is timed meanwhile is not disturbed
        ...
    film = recording.film()

Needs the standard library and `radixkv.render`, which draws the tree. The browser must be of 2024 or later.
"""

from .film import MAX_FRAMES, Film, Frame
from .meters import Meters
from .page import page
from .recording import Recording

__all__ = ["MAX_FRAMES", "Film", "Frame", "Meters", "Recording", "page"]
