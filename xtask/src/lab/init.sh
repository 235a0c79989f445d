#!/bin/sh
# First process of a lab machine. The kernel's console is ttyS0; ttyS1 carries the job's output and, after it, files
# and the exit code, each announced by a line that begins with the record separator (octal 036).
export PATH=/bin:/sbin:/usr/bin:/usr/sbin HOME=/root TERM=dumb

mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev 2>/dev/null
mkdir -p /dev/pts /dev/shm /sys/fs/bpf /sys/fs/cgroup
mount -t devpts devpts /dev/pts
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t tmpfs -o mode=1777 tmpfs /tmp
mount -t tmpfs -o mode=755 tmpfs /run
mount -t bpf bpf /sys/fs/bpf
mount -t debugfs debugfs /sys/kernel/debug
mount -t tracefs tracefs /sys/kernel/tracing
mount -t securityfs securityfs /sys/kernel/security
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mkdir -p /run/netns /run/lab/results

stty -F /dev/ttyS1 raw -echo
exec >/dev/ttyS1 2>&1 </dev/null

# end EXIT: hands back what the job left, then ends the emulator with the code (a byte written to I/O port 0xf4).
end() {
    cd /run/lab/results
    for name in *; do
        [ -f "$name" ] && printf '\036file %s %s\n' "$name" "$(stat -c %s "$name")" && cat "$name"
    done
    printf '\036exit %s\n' "$1"
    printf "\\$(printf %o $(($1 & 127)))" | dd of=/dev/port bs=1 seek=244 count=1 conv=notrunc 2>/dev/null
    poweroff -f
    sleep 10
}

. /lab/settings
for module in $LAB_MODULES; do
    # One at a time: further words would be parameters of the first module.
    modprobe "$module" || { printf '\036lab cannot load the module %s\n' "$module"; end 1; }
done
ip link set lo up || { printf '\036lab cannot set lo up\n'; end 1; }
if [ -n "$LAB_ADDRESS" ]; then
    # By path, or the shell takes its own ip, which knows less.
    ip link set eth0 up && ip address add "$LAB_ADDRESS" dev eth0 &&
        /bin/ip address add "$LAB_ADDRESS6" dev eth0 nodad || { printf '\036lab no network\n'; end 1; }
fi
printf '\036started %s\n' "$(cut -d' ' -f1 /proc/uptime)"

cd /lab/job
. /lab/environment
setsid sh /lab/command
end $?
