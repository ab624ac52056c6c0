# Two network devices of one machine that reach each other by a cable (veth) and not by way of lo, each with a Soft-RoCE
# device: rxe0 at 10.77.0.1, rxe1 at 10.77.0.2. So the cable's delay, loss and cut are those of RoCE, too.
ulimit -l unlimited
ip link add v0 address 02:00:00:00:00:01 mtu 4200 type veth peer name v1 address 02:00:00:00:00:02 mtu 4200
for setting in all/accept_local=1 all/rp_filter=0 default/rp_filter=0 v0/rp_filter=0 v1/rp_filter=0; do
  echo "${setting#*=}" > "/proc/sys/net/ipv4/conf/${setting%=*}"
done
for end in 0 1; do
  ip address add "10.77.0.$((end + 1))/32" dev "v$end"
  ip link set "v$end" up
done
for end in 0 1; do
  here=10.77.0.$((end + 1)) there=10.77.0.$((2 - end))
  ip neighbour replace "$there" lladdr "02:00:00:00:00:0$((2 - end))" dev "v$end" nud permanent
  ip route add "$there" dev "v$end" src "$here" table "10$end"
  for from in lo "v$end"; do  # what is sent; and the question whether an arriving request came the right way
    ip rule add pref "10$end" from "$here" to "$there" iif "$from" lookup "10$end"
  done
done
ip rule add pref 1000 lookup local
ip rule delete pref 0
for end in 0 1; do rdma link add "rxe$end" type rxe netdev "v$end"; done
