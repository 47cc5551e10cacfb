//! Values that plugins keep between the extension points of one cycle.

use std::any::{Any, TypeId};
use std::sync::Arc;

trait Entry: Any + Send + Sync {
    fn as_any(&self) -> &dyn Any;
    fn as_any_mut(&mut self) -> &mut dyn Any;
    fn duplicate(&self) -> Arc<dyn Entry>;
}

impl<T: Any + Clone + Send + Sync> Entry for T {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }

    fn duplicate(&self) -> Arc<dyn Entry> {
        Arc::new(self.clone())
    }
}

/// One value for each type. A clone shares the values until one side changes them: preemption clones the state once for
/// each node it tries.
#[derive(Default, Clone)]
pub struct CycleState {
    entries: Vec<(TypeId, Arc<dyn Entry>)>,
}

impl std::fmt::Debug for CycleState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CycleState").field("entries", &self.entries.len()).finish()
    }
}

impl CycleState {
    pub fn put<T: Any + Clone + Send + Sync>(&mut self, value: T) {
        let id = TypeId::of::<T>();
        match self.entries.iter_mut().find(|(known, _)| *known == id) {
            Some((_, held)) => *held = Arc::new(value),
            None => self.entries.push((id, Arc::new(value))),
        }
    }

    pub fn get<T: Any + Clone + Send + Sync>(&self) -> Option<&T> {
        let id = TypeId::of::<T>();
        let (_, held) = self.entries.iter().find(|(known, _)| *known == id)?;
        // `(**held)` names the value: an `Arc` is an `Entry` of its own.
        (**held).as_any().downcast_ref()
    }

    /// The value for changing; a value shared with a clone is copied first.
    pub fn get_mut<T: Any + Clone + Send + Sync>(&mut self) -> Option<&mut T> {
        let id = TypeId::of::<T>();
        let (_, held) = self.entries.iter_mut().find(|(known, _)| *known == id)?;
        if Arc::get_mut(held).is_none() {
            *held = (**held).duplicate();
        }
        Arc::get_mut(held)?.as_any_mut().downcast_mut()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clone_is_independent() {
        let mut state = CycleState::default();
        state.put(vec![1]);
        let mut clone = state.clone();
        clone.get_mut::<Vec<i32>>().unwrap().push(2);
        assert_eq!(state.get::<Vec<i32>>(), Some(&vec![1]));
        assert_eq!(clone.get::<Vec<i32>>(), Some(&vec![1, 2]));
        state.put(vec![7]);
        assert_eq!(state.get::<Vec<i32>>(), Some(&vec![7]));
        assert_eq!(state.get::<String>(), None);
    }
}
