"""Moved to cupaged.layout."""

from cupaged.layout import *  # noqa: F403
from cupaged.layout import Breach, Kind, Status, Where, Word  # noqa: F401
