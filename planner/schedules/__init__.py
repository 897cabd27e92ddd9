"""Schedules, one a file, each a pure function that gives every rank its actions; and the check of any table."""

from planner.schedules.action import Action, Letter, Order, Schedule, format_order, parse_action
from planner.schedules.build import MOST_FORWARDS, build, check_shape, default_warmup, shape_fault
from planner.schedules.check import ScheduleCheck, check_schedule, out_of_order
from planner.schedules.communication import Channels, Message, channels
from planner.schedules.names import Placement, ScheduleName
from planner.schedules.placement import rank_of, ranks_of
from planner.schedules.wiring import Wiring

__all__ = [
    "MOST_FORWARDS",
    "Action",
    "Channels",
    "Letter",
    "Message",
    "Order",
    "Placement",
    "Schedule",
    "ScheduleCheck",
    "ScheduleName",
    "Wiring",
    "build",
    "channels",
    "check_schedule",
    "check_shape",
    "default_warmup",
    "format_order",
    "out_of_order",
    "parse_action",
    "rank_of",
    "ranks_of",
    "shape_fault",
]
