//! Attaching tc programs to devices, by tcx links and by clsact filters, beside others' programs.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test code")]

use std::fs;
use std::net::UdpSocket;
use std::os::fd::{AsFd, OwnedFd};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use aya_obj::generated::bpf_attach_type;
use smc_policy::kernel::object::{Prepared, Sizes, TcProgram};
use smc_policy::kernel::sys as kernel;
use smc_policy::kernel::tc::{self, Attached, Device, Done, LinkLayer, Side, Way};
use smc_policy_tests::attaching::{
    World, add_devices, chain, device, is_ours, named, qdiscs, run, send, ways,
};
use smc_policy_tests::{Counting, eventually, needs, netns, scaled, tool};

#[test]
fn devices_are_listed_with_what_their_packets_begin_with() {
    needs!(Root, Netns);
    netns::in_new_namespace(&[], || {
        add_devices();
        let devices = tc::devices().unwrap();
        let seen: Vec<_> =
            devices.iter().map(|d| (d.name.as_str(), d.hardware, d.link_layer, d.has_address)).collect();
        let (ethernet, ip) = (Some(LinkLayer::Ethernet), Some(LinkLayer::Ip));
        // Some kernels add devices to every namespace.
        for expected in [
            ("lo", 772, ethernet, true),
            ("v0", 1, ethernet, true),
            ("v1", 1, ethernet, false),
            ("t0", 0xfffe, ip, true),
        ] {
            assert!(seen.contains(&expected), "{expected:?}: {seen:?}");
        }
        fs::write("/proc/sys/net/ipv6/conf/v1/disable_ipv6", "0").unwrap();
        run("ip -6 address add fd00::1/64 dev v1 nodad");
        assert!(device("v1").has_address);
        assert!(devices.is_sorted_by(|a, b| a.index < b.index));
    });
}

#[test]
fn packets_meet_a_program_on_devices_of_every_kind() {
    needs!(Root, Netns, Bpffs);
    World::each(|world| {
        add_devices();
        for (name, side, sender) in [
            ("lo", Side::Egress, "lo"),
            ("lo", Side::Ingress, "lo"),
            ("v0", Side::Egress, "v0"),
            ("v1", Side::Ingress, "v0"),
            ("t0", Side::Egress, "t0"),
        ] {
            println!("{name} {side:?}");
            let device = device(name);
            let program = Counting::load("smcpol_a");
            assert_eq!(chain(&device, side), []);
            assert_eq!(world.attach(&device, side, &program), Done::Attached);
            assert_eq!(world.attach(&device, side, &program), Done::Unchanged);
            let expected = Attached { program: program.id(), name: "smcpol_a".into(), way: world.way };
            assert_eq!(tc::chain(&device, side).unwrap(), [expected]);
            send(sender, 10);
            eventually("all are counted", || program.count() == 10);

            assert!(world.detach(&device, side));
            assert_eq!(chain(&device, side), []);
            send(sender, 10);
            assert!(!world.detach(&device, side), "nothing is there any more");
            world.assert_nothing_left();
            assert_eq!(program.count(), 10);
        }
    });
}

#[test]
fn the_tool_s_own_programs_fit_their_devices() {
    needs!(Root, Netns, Bpffs);
    World::each(|world| {
        add_devices();
        let prepared = Prepared::new(Sizes { cells: 64, slots: 4 }, None).unwrap();
        for (name, side, program) in [
            ("v0", Side::Egress, TcProgram::EgressEthernet),
            ("v0", Side::Ingress, TcProgram::IngressEthernet),
            ("t0", Side::Egress, TcProgram::EgressIp),
            ("t0", Side::Ingress, TcProgram::IngressIp),
        ] {
            let device = device(name);
            let loaded = prepared.load_tc(program).expect("the verifier accepts it");
            assert_eq!(world.attach(&device, side, &loaded), Done::Attached);
            // It outlives whoever loaded it.
            drop(loaded);
            assert_eq!(chain(&device, side), named(&[program.program()], world.way));
        }
        for name in ["v0", "t0"] {
            for side in Side::ALL {
                assert!(world.detach(&device(name), side));
            }
        }
        world.assert_nothing_left();
    });
}

#[test]
fn others_programs_keep_their_places() {
    needs!(Root, Netns, Bpffs);
    World::each(|world| {
        let lo = device("lo");
        for side in Side::ALL {
            if world.way == Way::Clsact {
                run("tc qdisc add dev lo clsact");
            }
            let [ours, newer, behind, ahead] =
                ["smcpol_a", "smcpol_b", "behind", "ahead"].map(Counting::load);
            let _behind = world.add_foreign(&lo, side, &behind, false);
            let before = tc::chain(&lo, side).unwrap();
            assert_eq!(world.attach(&lo, side, &ours), Done::Attached);
            assert_eq!(chain(&lo, side), named(&["smcpol_a", "behind"], world.way), "ours is first");

            let ahead_link = world.add_foreign(&lo, side, &ahead, true);
            let expected = named(&["ahead", "smcpol_a", "behind"], world.way);
            assert_eq!(chain(&lo, side), expected);
            assert_eq!(world.attach(&lo, side, &ours), Done::Unchanged);
            assert_eq!(chain(&lo, side), expected, "who came ahead later stays there");
            assert_eq!(world.attach(&lo, side, &newer), Done::Replaced);
            assert_eq!(chain(&lo, side), named(&["ahead", "smcpol_b", "behind"], world.way), "in place");

            send("lo", 10);
            assert_eq!([&ahead, &newer, &behind, &ours].map(Counting::count), [10, 10, 10, 0]);

            assert!(world.detach(&lo, side));
            assert_eq!(chain(&lo, side), named(&["ahead", "behind"], world.way));
            send("lo", 10);
            assert_eq!([&ahead, &newer, &behind].map(Counting::count), [20, 10, 20]);
            assert_eq!(world.pins(), [""; 0]);
            match world.way {
                Way::Tcx => drop(ahead_link),
                Way::Clsact => {
                    run(&format!("tc filter del dev lo {} pref 1", side));
                    assert!(qdiscs().contains("clsact"), "somebody else's");
                }
            }
            assert_eq!(tc::chain(&lo, side).unwrap(), before);
            if world.way == Way::Clsact {
                run("tc qdisc del dev lo clsact");
            }
        }
    });
}

#[test]
fn every_packet_meets_the_old_program_or_the_new_one() {
    needs!(Root, Netns, Bpffs);
    World::each(|world| {
        let lo = device("lo");
        for side in Side::ALL {
            let programs = [Counting::load("smcpol_a"), Counting::load("smcpol_b")];
            assert_eq!(world.attach(&lo, side, &programs[0]), Done::Attached);
            let stop = AtomicBool::new(false);
            let sent = thread::scope(|scope| {
                let sender = scope.spawn(|| ping(&stop));
                for round in 1..=scaled(2000) {
                    // Some follow each other at once, most while packets flow.
                    if round % 4 > 0 {
                        let current = &programs[(round - 1) % 2];
                        let before = current.count();
                        eventually_soon("packets flow", || current.count() > before);
                    }
                    assert_eq!(world.attach(&lo, side, &programs[round % 2]), Done::Replaced);
                }
                stop.store(true, Ordering::Relaxed);
                sender.join().unwrap()
            });
            let counts = programs.each_ref().map(Counting::count);
            println!("{side:?}: {sent} packets, {counts:?}");
            assert_eq!(counts.iter().sum::<u64>(), sent, "none met both or none");
            assert!(counts.iter().all(|count| *count > 0), "both were met");
            assert!(world.detach(&lo, side));
        }
        world.assert_nothing_left();
    });
}

/// As `eventually`, for what takes microseconds.
#[track_caller]
fn eventually_soon(what: &str, is_so: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !is_so() {
        assert!(Instant::now() < end, "waited in vain: {what}");
        thread::yield_now();
    }
}

/// Sends over lo, each when the one before has arrived, until told to stop. How many packets.
fn ping(stop: &AtomicBool) -> u64 {
    let receiver = UdpSocket::bind("127.0.0.1:0").unwrap();
    receiver.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
    sender.connect(receiver.local_addr().unwrap()).unwrap();
    let mut sent = 0;
    while !stop.load(Ordering::Relaxed) {
        sender.send(b"x").unwrap();
        receiver.recv(&mut [0; 8]).expect("the packet arrives");
        sent += 1;
    }
    sent
}

#[test]
fn a_new_device_with_an_old_one_s_index_is_another_device() {
    needs!(Root, Netns, Bpffs);
    World::each(|world| {
        let add = || {
            run("ip link add v0 index 77 type veth peer name v1 index 78");
            device("v0")
        };
        let [ours, newer, foreign] = ["smcpol_a", "smcpol_b", "foreign"].map(Counting::load);
        let v0 = add();
        assert_eq!(v0.index, 77);
        for side in Side::ALL {
            assert_eq!(world.attach(&v0, side, &ours), Done::Attached);
        }
        run("ip link del v0");
        for side in Side::ALL {
            assert_eq!(world.attach(&v0, side, &ours), Done::NoDevice);
            assert_eq!(tc::chain(&v0, side).unwrap(), []);
        }
        let v0 = add();
        let _theirs = add_foreign_qdisc(world, &v0, &foreign);
        for side in Side::ALL {
            assert_eq!(world.attach(&v0, side, &newer), Done::Attached);
            assert_eq!(chain(&v0, side)[0], ("smcpol_b".to_owned(), world.way));
        }
        run("ip link set v0 up");
        for side in Side::ALL {
            assert!(world.detach(&v0, side));
        }
        assert_eq!(chain(&v0, Side::Egress).len(), 1, "the foreign one");
        assert_eq!(qdiscs().is_empty(), world.way == Way::Tcx);

        // Gone for good: detach and prune clean up.
        for side in Side::ALL {
            assert_eq!(world.attach(&v0, side, &ours), Done::Attached);
        }
        run("ip link del v0");
        assert!(!world.detach(&v0, Side::Egress));
        let left = usize::from(world.way == Way::Tcx);
        assert_eq!(world.pins().len(), left);
        assert_eq!(tc::prune(&world.links()).unwrap(), left);
        world.assert_nothing_left();
    });
}

/// A foreign program at the egress of a new device; by filters: with a foreign qdisc.
fn add_foreign_qdisc(world: &World, device: &Device, program: &Counting) -> Option<OwnedFd> {
    if world.way == Way::Clsact {
        run(&format!("tc qdisc add dev {} clsact", device.name));
    }
    world.add_foreign(device, Side::Egress, program, false)
}

#[test]
fn namespaces_are_told_apart() {
    needs!(Root, Netns, Bpffs);
    World::each(|world| {
        let lo = device("lo");
        let [here, there] = ["smcpol_a", "smcpol_b"].map(Counting::load);
        assert_eq!(world.attach(&lo, Side::Egress, &here), Done::Attached);
        let pins = world.pins();
        netns::in_new_namespace(&[], || {
            // The same folder of links, and a device of the same index.
            let (links, inode) = (world.links(), World::here(world.way).namespace);
            let (lo, side) = (device("lo"), Side::Egress);
            let done = tc::attach_by(world.way, &links, inode, &lo, side, there.as_fd(), &is_ours);
            assert_eq!(done.unwrap(), Done::Attached);
            assert_eq!(chain(&lo, side), named(&["smcpol_b"], world.way));
            send("lo", 10);
            assert_eq!((here.count(), there.count()), (0, 10));
        });
        // The namespace goes with its last thread, some time later.
        eventually("what was there is gone", || {
            tc::prune(&world.links()).unwrap();
            world.pins() == pins
        });
        assert_eq!(chain(&lo, Side::Egress), named(&["smcpol_a"], world.way));
        send("lo", 10);
        assert_eq!((here.count(), there.count()), (10, 10));
        assert!(world.detach(&lo, Side::Egress));
        world.assert_nothing_left();
    });
}

#[test]
fn several_of_ours_become_one() {
    needs!(Root, Netns, Bpffs);
    World::each(|world| {
        let lo = device("lo");
        let [ours, newer, more] = ["smcpol_a", "smcpol_b", "smcpol_c"].map(Counting::load);
        for side in Side::ALL {
            for ahead in [true, false] {
                world.attach(&lo, side, &ours);
                let _held = world.add_foreign(&lo, side, &more, ahead);
                assert_eq!(chain(&lo, side).len(), 2);
                assert_eq!(world.attach(&lo, side, &newer), Done::Replaced);
                assert_eq!(chain(&lo, side), named(&["smcpol_b"], world.way));
                assert!(world.detach(&lo, side));
            }
        }
        world.assert_nothing_left();
    });
}

#[test]
fn a_link_that_somebody_holds_is_taken_over() {
    needs!(Root, Netns, Bpffs, Tcx);
    netns::in_new_namespace(&[], || {
        let world = World::here(Way::Tcx);
        let lo = device("lo");
        let ours = Counting::load("smcpol_a");
        let at = bpf_attach_type::BPF_TCX_EGRESS;
        let held = kernel::tcx_link_create(lo.index, at, ours.as_fd()).unwrap();
        assert_eq!(world.attach(&lo, Side::Egress, &ours), Done::Unchanged);
        assert_eq!(world.pins().len(), 1);
        drop(held);
        assert_eq!(chain(&lo, Side::Egress), named(&["smcpol_a"], Way::Tcx), "pinned now");

        // One whose pin is lost, and that nobody holds, is none.
        tool::remove_pins(&world.links());
        eventually("the kernel lets go of it", || chain(&lo, Side::Egress).is_empty());
        assert_eq!(world.attach(&lo, Side::Egress, &ours), Done::Attached);
        // Held or not, it goes.
        let held = kernel::get_pinned(&world.links().join(&world.pins()[0])).unwrap();
        assert!(world.detach(&lo, Side::Egress));
        assert_eq!(chain(&lo, Side::Egress), []);
        drop(held);
        world.assert_nothing_left();
    });
}

#[test]
fn a_device_that_moved_away_is_left_alone() {
    needs!(Root, Netns, Bpffs, Tcx);
    netns::in_new_namespace(&[], || {
        let world = World::here(Way::Tcx);
        let [ours, newer] = ["smcpol_a", "smcpol_b"].map(Counting::load);
        run("ip link add v0 index 77 type veth peer name v1");
        let v0 = device("v0");
        world.attach(&v0, Side::Egress, &ours);
        let held = kernel::get_pinned(&world.links().join(&world.pins()[0])).unwrap();
        // A namespace for it, which lasts as long as this process.
        let mut keeper = netns::in_new_namespace(&[], || Command::new("sleep").arg("100").spawn().unwrap());
        run(&format!("ip link set v0 netns {}", keeper.id()));
        let moved = kernel::tcx_link_info(held.as_fd()).unwrap().unwrap();
        println!("where it went: {moved:?}");

        run("ip link add v0 index 77 type veth peer name v2");
        let v0 = device("v0");
        assert_eq!(chain(&v0, Side::Egress), []);
        assert_eq!(world.attach(&v0, Side::Egress, &newer), Done::Attached);
        assert_eq!(chain(&v0, Side::Egress), named(&["smcpol_b"], Way::Tcx));
        let now = kernel::tcx_link_info(held.as_fd()).unwrap().unwrap();
        assert_eq!((now.id, now.program), (moved.id, ours.id()), "its program is not replaced");
        assert!(world.detach(&v0, Side::Egress));
        drop(held);
        keeper.kill().unwrap();
        keeper.wait().unwrap();
        world.assert_nothing_left();
    });
}

#[test]
fn both_ways_at_once_become_one() {
    needs!(Root, Netns, Bpffs, Tcx);
    netns::in_new_namespace(&[], || {
        let lo = device("lo");
        let [ours, newer] = ["smcpol_a", "smcpol_b"].map(Counting::load);
        let worlds = ways().into_iter().map(World::here);
        let [tcx, clsact] = worlds.collect::<Vec<_>>().try_into().ok().unwrap();
        assert_eq!(clsact.attach(&lo, Side::Egress, &ours), Done::Attached);
        assert_eq!(tcx.attach(&lo, Side::Egress, &newer), Done::Attached);
        assert_eq!(chain(&lo, Side::Egress), named(&["smcpol_b"], Way::Tcx));
        assert_eq!(qdiscs(), "");
        let foreign = Counting::load("foreign");
        run("tc qdisc add dev lo clsact");
        tcx.add_filter(&lo, Side::Egress, &foreign, "protocol all");
        let both = [("smcpol_b".to_owned(), Way::Tcx), ("foreign".to_owned(), Way::Clsact)];
        assert_eq!(chain(&lo, Side::Egress), both, "packets meet links first");
        assert!(tcx.detach(&lo, Side::Egress));
    });
}
