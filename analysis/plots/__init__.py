"""Pictures of an op's rows, and how pictures look and are saved."""
