"""As much of `trex.astf.api` as is used."""

from types import SimpleNamespace

from ..loading import TRexError, TRexTimeoutError, profile  # noqa: F401


class ASTFProgram:
    def __init__(self, file=None, side='c', commands=None, stream=True, s_delay=None, udp_mtu=None, addon=None):
        self.commands, self.labels = [], {}

    def send(self, buf, size=0, fill=None):
        self.commands.append({'name': 'tx', 'bytes': max(size, len(buf))})

    def recv(self, bytes, clear=False):
        self.commands.append({'name': 'rx', 'min_bytes': bytes, 'clear': clear})

    def delay(self, usec):
        self.commands.append({'name': 'delay', 'usec': usec})

    def set_var(self, var_id, val):
        self.commands.append({'name': 'set_var', 'val': val})

    def set_label(self, label):
        self.labels[label] = len(self.commands)

    def jmp_nz(self, var_id, label):
        self.commands.append({'name': 'jmp_nz', 'offset': self.labels[label] - len(self.commands)})


class ASTFIPGenDist:
    def __init__(self, ip_range, distribution='seq', per_core_distribution=None):
        self.range = ip_range


class ASTFIPGenGlobal:
    def __init__(self, ip_offset='1.0.0.0', ip_offset_server=None):
        self.offset = ip_offset


class ASTFIPGen:
    def __init__(self, dist_client, dist_server, glob=ASTFIPGenGlobal()):
        self.sides = [(side, dist.range, glob.offset) for side, dist in (('c', dist_client), ('s', dist_server))]


class ASTFAssociationRule:
    def __init__(self, port=80, ip_start=None, ip_end=None, l7_map=None, assoc_id=None):
        self.port = port


class ASTFTCPClientTemplate:
    def __init__(self, ip_gen, cluster=None, program=None, port=80, cps=1, glob_info=None, limit=None, cont=None,
                 core_base=None):
        self.ip_gen, self.program = ip_gen, program
        self.fields = {'port': port, 'cps': cps, **({'limit': limit, 'cont': cont} if limit else {})}


class ASTFTCPServerTemplate:
    def __init__(self, program=None, assoc=None, glob_info=None):
        self.program, self.port = program, assoc.port


class ASTFTemplate:
    def __init__(self, client_template=None, server_template=None, tg_name=None):
        self.client, self.server, self.group = client_template, server_template, tg_name


class ASTFGlobalInfo:
    def __init__(self):
        self.tcp = SimpleNamespace()

    def to_json(self):
        return {'tcp': vars(self.tcp)}


class ASTFProfile:
    def __init__(self, default_ip_gen, default_c_glob_info=None, default_s_glob_info=None, templates=None, cap_list=None,
                 s_delay=None, udp_mtu=None):
        self.templates = templates if isinstance(templates, list) else [templates]
        self.client_info = default_c_glob_info
        self.tg_name_to_id = {template.group: number for number, template in enumerate(self.templates, 1)}

    def to_json(self):
        programs = [side.program for template in self.templates for side in (template.client, template.server)]
        document = {'templates': [{'client_template': {'program_index': 2 * number, **template.client.fields},
                                   'server_template': {'program_index': 2 * number + 1,
                                                       'assoc': [{'port': template.server.port}]}}
                                  for number, template in enumerate(self.templates)],
                    'program_list': [{'commands': program.commands} for program in programs],
                    'ip_gen_dist_list': [{'dir': side, 'ip_start': ends[0], 'ip_end': ends[1], 'ip_offset': offset}
                                         for side, ends, offset in self.templates[0].client.ip_gen.sides]}
        if self.client_info:
            document['c_glob_info'] = self.client_info.to_json()
        return document

    @classmethod
    def load(cls, filename, **kwargs):
        return profile(filename, lambda made, **given: made.get_profile(**given), **kwargs)


class ASTFClient:
    """No server is ever there; the tests have clients of their own."""

    def __init__(self, username='', server='localhost', sync_port=4501, async_port=4500, verbose_level='error',
                 logger=None, sync_timeout=None, async_timeout=None):
        self.server = server

    def connect(self):
        raise TRexError(f'no server at {self.server}')

    def disconnect(self, stop_traffic=True, release_ports=True):
        pass

    def reset(self, restart=False):
        raise NotImplementedError

    def get_all_ports(self):
        raise NotImplementedError

    def get_server_version(self):
        raise NotImplementedError

    def get_server_system_info(self):
        raise NotImplementedError

    def get_port_attr(self, port):
        raise NotImplementedError

    def get_util_stats(self):
        raise NotImplementedError

    def set_l2_mode(self, port, dst_mac):
        raise NotImplementedError

    def set_l3_mode(self, port, src_ipv4, dst_ipv4, vlan=None):
        raise NotImplementedError

    def set_service_mode(self, ports=None, enabled=True, filtered=False, mask=None):
        raise NotImplementedError

    def load_profile(self, profile, tunables={}, pid_input='_'):
        raise NotImplementedError

    def clear_profile(self, block=True, pid_input='_'):
        raise NotImplementedError

    def clear_stats(self, ports=None, clear_global=True, clear_xstats=True, clear_traffic=True, pid_input='_'):
        raise NotImplementedError

    def start(self, mult=1, duration=-1, nc=False, block=True, latency_pps=0, ipv6=False, pid_input='_',
              client_mask=0xFFFFFFFF, e_duration=0, t_duration=0, dump_interval=0):
        raise NotImplementedError

    def stop(self, block=True, pid_input='_', is_remove=False):
        raise NotImplementedError

    def get_stats(self, ports=None, sync_now=True, skip_zero=True, pid_input='_', is_sum=False):
        raise NotImplementedError

    def wait_on_traffic(self, timeout=None, profile_id=None):
        raise NotImplementedError

    def get_traffic_tg_stats(self, tg_names, skip_zero=True, pid_input='_'):
        raise NotImplementedError
