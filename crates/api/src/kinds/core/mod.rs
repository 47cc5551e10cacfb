//! Kinds of the core group that are not in files of their own beside this directory.

pub(super) mod componentstatus;
pub(super) mod limitrange;
pub(super) mod persistentvolume;
pub(super) mod persistentvolumeclaim;
pub(super) mod podtemplate;
pub(super) mod replicationcontroller;
pub(super) mod resourcequota;
