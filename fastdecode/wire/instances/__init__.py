"""What a controller and instances say to each other."""
