#!/bin/busybox sh
# Init of the guest: the machine's own files, read-only, with a writable layer above; two ends of a cable, each with a
# Soft-RoCE device; then the command of the kernel's command line. Prints GUEST_RC=<status>.
busybox=/bin/busybox layer=/layer root=/root
$busybox mkdir -p /proc /sys /dev /host /layer /root
$busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
for module in virtio_pci 9pnet_virtio 9p overlay; do modprobe "$module"; done
mount -t 9p -o trans=virtio,version=9p2000.L,msize=524288,cache=loose,ro host /host
mount -t tmpfs -o size=1g tmpfs /layer
mkdir $layer/upper $layer/work
mount -t overlay -o lowerdir=/host,upperdir=$layer/upper,workdir=$layer/work overlay $root
for folder in proc sys dev; do mount --bind "/$folder" "$root/$folder"; done
mkdir -p $root/dev/shm $root/dev/pts
mount -t tmpfs tmpfs $root/dev/shm
mount -t devpts devpts $root/dev/pts
mount -t tmpfs tmpfs $root/run
mount -t tmpfs tmpfs $root/tmp
mount -t 9p -o trans=virtio,version=9p2000.L,msize=524288 out $root/mnt
ip link set lo up
for module in crc32_pclmul crc32_generic rdma_rxe rdma_ucm ib_uverbs veth sch_netem; do modprobe "$module"; done
command=$(sed -n 's/.*guest_command=\([^ ]*\).*/\1/p' /proc/cmdline | base64 -d)
chroot $root /bin/bash -c "export HOME=/tmp PATH=/usr/sbin:/usr/bin:/sbin:/bin; . ${1:-/dev/null}; $command"
echo "GUEST_RC=$?"
poweroff -f
