//! The stored weight manifest: tensors, fragments, aliases, extra files and payload ranges.
