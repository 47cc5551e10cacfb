//! A value that work needs on threads that may block.

use ferrite_nft::KernelError;

/// The work had no result.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LentError {
    #[error(transparent)]
    Kernel(#[from] KernelError),
    #[error("a defect ended the work on the nftables table; the table is made again")]
    Panicked,
}

/// A value that is lent to one thread at a time. Work that panics loses it, and the next work gets a new one.
pub(crate) struct Lent<T> {
    value: Option<T>,
    make: Box<dyn Fn() -> Result<T, KernelError> + Send>,
}

impl<T: Send + 'static> Lent<T> {
    pub(crate) fn new(
        make: impl Fn() -> Result<T, KernelError> + Send + 'static,
    ) -> Result<Self, KernelError> {
        Ok(Self { value: Some(make()?), make: Box::new(make) })
    }

    /// The value; `None` after work that panicked.
    pub(crate) fn get(&self) -> Option<&T> {
        self.value.as_ref()
    }

    /// Makes the value again if it was lost. Returns true if that was so.
    pub(crate) fn ensure(&mut self) -> Result<bool, KernelError> {
        if self.value.is_some() {
            return Ok(false);
        }
        self.value = Some((self.make)()?);
        Ok(true)
    }

    /// Does the work on a thread that may block.
    pub(crate) async fn work<R: Send + 'static>(
        &mut self,
        work: impl FnOnce(&mut T) -> Result<R, KernelError> + Send + 'static,
    ) -> Result<R, LentError> {
        self.ensure()?;
        let Some(mut value) = self.value.take() else { return Err(LentError::Panicked) };
        let work = move || {
            let result = work(&mut value);
            (value, result)
        };
        let Ok((value, result)) = tokio::task::spawn_blocking(work).await else {
            return Err(LentError::Panicked);
        };
        self.value = Some(value);
        Ok(result?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn work_that_panics_is_an_error_and_the_next_work_has_a_new_value() {
        let mut lent = Lent::new(|| Ok(vec![1])).unwrap();
        let push = |list: &mut Vec<i32>| {
            list.push(2);
            Ok(list.len())
        };
        assert_eq!(lent.work(push).await.unwrap(), 2);
        assert_eq!(lent.work(push).await.unwrap(), 3);
        let defect = |_: &mut Vec<i32>| -> Result<(), KernelError> { panic!("a defect") };
        assert!(matches!(lent.work(defect).await, Err(LentError::Panicked)));
        assert!(lent.get().is_none());
        assert!(lent.ensure().unwrap(), "the caller learns that the value is a new one");
        assert_eq!(lent.work(push).await.unwrap(), 2);
        assert!(!lent.ensure().unwrap());
    }
}
