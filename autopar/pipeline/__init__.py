"""Pipeline parallelism as arithmetic: schedules, the time that they take, and which regions each stage has."""
