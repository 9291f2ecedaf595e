"""What the HTTP process answers: routes, their protection, bodies and streams."""
