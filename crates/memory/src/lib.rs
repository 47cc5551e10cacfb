//! The allocator of the whole program.
//!
//! Requests make and drop many small values on several threads at once, some of them on another thread than they were
//! made on. An allocator with a heap for each thread has no locks to fight for. Huge pages are off: they are quick to
//! fill and slow to give back, and most of this program is small.

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Gives back what is free to the system. Worth a call when a burst of work is over.
pub fn give_back() {
    // SAFETY: pages that hold nothing are released; what is allocated stays where it is.
    unsafe { libmimalloc_sys::mi_collect(true) };
    // C code has its own.
    #[cfg(target_env = "gnu")]
    // SAFETY: as above.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Lets programs that this process starts have huge pages if they want: that they are off is inherited.
pub fn allow_huge_pages_again() {
    // SAFETY: plain integers.
    unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, 0, 0, 0, 0) };
}
