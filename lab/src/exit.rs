//! The probe that ends paths early: a call returns as if all were done once it reaches a stage, and
//! what has been built for it so far is undone.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

use fulmar_stack::base::{Outside, Probe, Stage, StepAblation};

/// Where calls return, and which step is done in another way; shared with whoever moves it.
#[derive(Clone, Debug)]
pub struct ExitPoint(Arc<Asked>);

#[derive(Debug)]
struct Asked {
    stage: AtomicU8,
    variation: AtomicU8,
}

/// No stage and no variation has this number.
const NOWHERE: u8 = u8::MAX;

impl Default for ExitPoint {
    fn default() -> Self {
        ExitPoint(Arc::new(Asked {
            stage: AtomicU8::new(NOWHERE),
            variation: AtomicU8::new(NOWHERE),
        }))
    }
}

impl ExitPoint {
    /// From now on calls return at `stage`; `None`: they go all the way.
    pub fn set(&self, stage: Option<Stage>) {
        self.0.stage.store(stage.map_or(NOWHERE, |s| s as u8), Relaxed);
    }

    /// From now on a step is done in another way; `None`: all as usual.
    pub fn vary(&self, variation: Option<StepAblation>) {
        self.0.variation.store(variation.map_or(NOWHERE, |v| v as u8), Relaxed);
    }

    #[inline]
    fn is_at(&self, stage: Stage) -> bool {
        self.0.stage.load(Relaxed) == stage as u8
    }

    /// One look for all of them.
    #[inline]
    fn is_at_one_of<const N: usize>(&self, stages: [Stage; N]) -> bool {
        let at = self.0.stage.load(Relaxed);
        stages.into_iter().any(|stage| at == stage as u8)
    }

    #[inline]
    fn is_varied_in<const N: usize>(&self, variations: [StepAblation; N]) -> bool {
        let variation = self.0.variation.load(Relaxed);
        variations.into_iter().any(|v| variation == v as u8)
    }
}

impl Outside for ExitPoint {
    #[inline]
    fn stage(&self, stage: Stage) -> ControlFlow<()> {
        flow(self.is_at(stage))
    }
}

/// What a probe answers.
#[inline]
fn flow(ends: bool) -> ControlFlow<()> {
    if ends { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
}

/// The probe.
#[derive(Debug)]
pub struct Exit(ExitPoint);

impl Exit {
    /// Ends paths where `at` says.
    pub fn new(at: ExitPoint) -> Exit {
        Exit(at)
    }
}

impl Probe for Exit {
    type Outside = ExitPoint;

    fn outside(&self) -> ExitPoint {
        self.0.clone()
    }

    #[inline]
    fn stage(&mut self, stage: Stage) -> ControlFlow<()> {
        flow(self.0.is_at(stage))
    }

    #[inline]
    fn stages<const N: usize>(&mut self, stages: [Stage; N]) -> ControlFlow<()> {
        flow(self.0.is_at_one_of(stages))
    }

    #[inline]
    fn stops_at(&self, stage: Stage) -> bool {
        self.0.is_at(stage)
    }

    #[inline]
    fn ablates(&self, variation: StepAblation) -> bool {
        self.0.is_varied_in([variation])
    }

    #[inline]
    fn varies_in<const N: usize>(&self, variations: [StepAblation; N]) -> bool {
        self.0.is_varied_in(variations)
    }
}
