"""Speculation: guess tokens ahead, check them all in one step, keep those that are right."""
