//! Runs the models of all rooms: `make loom`. Arguments are parts of the names of those that are to run.

#[cfg(not(fulmar_loom))]
fn main() {}

#[cfg(fulmar_loom)]
fn main() -> std::process::ExitCode {
    modelled::run(&std::env::args().skip(1).collect::<Vec<_>>())
}

#[cfg(fulmar_loom)]
mod modelled {
    use std::process::ExitCode;
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
    use std::thread;

    use fulmar_stack::models::{Model, orders};

    const ROOMS: &[(&str, &[&[Model]])] = &[
        ("mbuf", &[fulmar_stack::mbuf::MODELS]),
        ("drivers", &[fulmar::internals::drivers::MODELS]),
        ("runtime", fulmar::internals::runtime::MODELS),
    ];

    /// Runs the models on one thread for each CPU.
    pub fn run(wanted: &[String]) -> ExitCode {
        let all = ROOMS
            .iter()
            .flat_map(|(room, files)| files.concat().into_iter().map(move |m| (*room, m)));
        let models: Vec<_> = all
            .filter(|(_, (name, _))| wanted.is_empty() || wanted.iter().any(|w| name.contains(w)))
            .collect();
        let (next, passed) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let work = || {
            while let Some(model) = models.get(next.fetch_add(1, Relaxed)) {
                passed.fetch_add(usize::from(passes(*model)), Relaxed);
            }
        };
        let threads = thread::available_parallelism().map_or(1, usize::from);
        thread::scope(|s| (0..threads).for_each(|_| drop(s.spawn(work))));
        let (passed, failed) = (passed.load(Relaxed), models.len() - passed.load(Relaxed));
        println!("test result: {passed} passed; {failed} failed");
        ExitCode::from(u8::from(failed > 0 || passed == 0))
    }

    /// On a thread of its own: loom keeps much in its locals.
    fn passes((room, (name, run)): (&'static str, Model)) -> bool {
        let tried = thread::spawn(move || {
            run();
            orders()
        });
        let tried = tried.join();
        match &tried {
            Ok(orders) => println!("{room}: {name} ... ok, {orders} orders"),
            Err(_) => println!("{room}: {name} ... FAILED"),
        }
        tried.is_ok()
    }
}
