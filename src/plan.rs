//! The memory plan.
