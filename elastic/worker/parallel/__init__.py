"""The axes on torch: tensor parallel, FSDP, pipeline, context parallel, draws that do not see the
layout, and how blocks are compiled and checkpointed."""
