//! Every metric, named once.
