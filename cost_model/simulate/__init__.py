"""What would a schedule, a cache policy or a pipeline gain? A trace, run by
``fastdecode.schedule.simulation`` or on its clock."""
