//! From the author of a pod: fields that ask for more than the policy allows.
