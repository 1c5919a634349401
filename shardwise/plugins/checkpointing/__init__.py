"""Values of ``activation_checkpointing`` that treat the blocks of a stage together: sqrt and recursive:S."""
