"""Pipeline parallelism: schedules, and the runtime that follows them."""
