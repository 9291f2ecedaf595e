"""Messages between the ranks of an MPI job."""
