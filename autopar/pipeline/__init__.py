"""Pipeline parallelism as arithmetic: schedules, their times, and the regions of each stage."""
