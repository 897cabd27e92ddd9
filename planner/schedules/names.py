"""The schedules and placements that plans name."""

from __future__ import annotations

from enum import StrEnum


class ScheduleName(StrEnum):
    """Every schedule a plan may name; ``synthesised`` brings its own actions."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved-1f1b"
    LOOPED_BFS = "looped-bfs"
    ZB_H1 = "zb-h1"
    ZB_H2 = "zb-h2"
    ZB_V = "zb-v"
    DUALPIPE_V = "dualpipe-v"
    V_HALF = "v-half"
    V_MIN = "v-min"
    SYNTHESISED = "synthesised"


class Placement(StrEnum):
    """Which rank runs which stage. LOOP: k mod P. V: two a rank, 0..P-1 then P-1..0. FREE: v on each rank, any."""

    LOOP = "loop"
    V = "v"
    FREE = "free"
