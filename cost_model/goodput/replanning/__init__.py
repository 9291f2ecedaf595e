"""When roles of running instances are judged again, and what they should be then."""
