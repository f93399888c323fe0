//! What was asked for, checked.
