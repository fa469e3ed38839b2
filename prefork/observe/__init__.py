"""What the server tells of itself: names, instruments and pages, all made from the scoreboard at the moment of asking.

Runs in the telemetry process; nothing here writes to the scoreboard, keeps a count of its own or leaves a file.
"""
