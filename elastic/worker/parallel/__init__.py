"""The axes on torch: tensor parallel, FSDP, pipeline, context parallel, and how blocks are compiled
and checkpointed."""
