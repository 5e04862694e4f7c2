"""A real router before small engines in processes of their own, and faults of all of them."""
