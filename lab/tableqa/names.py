"""Names of people, occupations and countries for the training data: lists, and words invented from syllables.

Most people in the training data have invented names, since a model that saw only listed names could read no others.
No name in held_out.py is in a list here.
"""

import random

FIRST = """
    John Jane Alice Bob Carol Dave Emma Frank Grace Henry Irene Jack Karen Leo Mia Noah Olivia Peter Quinn Rachel
    Steve Tina Umar Victor Wendy Xavier Yara Zack Amy Ben Clara Dylan Elena Felix Gina Hugo Isla Jonas Kira Liam
    Maya Nina Oscar Paula Ravi Sofia Theo Uma Vera Walter Xena Yusuf Zoe Adam Bella Chen Diego Esther Farid Greta
    James Robert William Richard Charles Daniel Matthew Anthony Mark Paul Andrew Joshua Kevin Brian George Edward
    Ronald Timothy Jason Jeffrey Ryan Jacob Gary Eric Stephen Larry Justin Scott Brandon Raymond Gregory Patricia
    Jennifer Barbara Susan Jessica Margaret Lisa Betty Sandra Ashley Kimberly Donna Michelle Amanda Melissa Deborah
    Stephanie Rebecca Laura Cynthia Kathleen Angela Shirley Brenda Pamela Nicole Katherine Samantha Christine Carmen
    Miguel Juan Luis Javier Pablo Andrés Jürgen Björn Anneliese Dieter Heike Giulia Matteo Chiara François Élodie
    Thérèse Benoît Ingrid Astrid Magnus Sven Katya Dmitri Olga Sergei Anjali Vikram Deepak Sunita Arjun Meera Kenji
    Haruto Aiko Naoko Jin Min Xiu Ling Hao Mei Nguyen Thanh Amina Kwame Abena Chidi Ngozi Omar Layla Hassan Zainab
""".split()
LAST = """
    Doe Smith Johnson Brown White Green Black Blue Yellow Violet Orange Indigo Red Gray Silver Gold Stone Rivers
    Woods Hill Field Marsh Lake Frost Storm Snow Rain Sharp Swift Young Long Short Strong Wise King Knight Bishop
    Miller Cooper Fisher Hunter Mason Carter Turner Parker Walker Taylor Potter Weaver Archer Fowler Porter
    Shepherd Singer Piper Harper Page Reed Wells Jones Davis Wilson Anderson Thomas Moore Martin Thompson Robinson
    Lewis Hall Allen Wright Adams Nelson Mitchell Roberts Phillips Evans Edwards Collins Stewart Morris Rogers Cook
    Morgan Bailey Richardson Howard Ward Peterson Watson Brooks Sanders Bennett Hughes Foster Jenkins Perry Powell
    Russell Sullivan Fernández Ramírez Torres Álvarez Castillo Mendoza Vargas Delgado Schmidt Schneider Weber Wagner
    Becker Schulz Hoffmann Koch Zimmermann Dubois Laurent Lefebvre Moreau Girard Bianchi Ricci Esposito Conti Larsson
    Nilsson Eriksson Hansen Andersen Jørgensen Kowalski Wójcik Petrov Volkov Popov Sharma Gupta Singh Reddy Iyer
    Tanaka Suzuki Watanabe Yamamoto Kim Park Choi Chen Liu Wang Huang Zhao Tran Pham Okafor Mensah Diallo Mwangi
    Haddad Rahman Aziz Demir Kaya Papadopoulos Novak Horvat
""".split()
JOBS = """
    Engineer Doctor Teacher Lawyer Scientist Nurse Artist Chef Writer Musician Pilot Farmer Plumber Painter Driver
    Banker Dentist Judge Sailor Tailor Barber Butcher Librarian Architect Carpenter Electrician Gardener
    Journalist Mechanic Photographer Accountant Actor Analyst Astronomer Biologist Chemist Cook Dancer Designer
    Developer Editor Economist Fisherman Firefighter Florist Geologist Historian Manager Mathematician Miner Optician
    Pharmacist Physicist Poet Programmer Professor Researcher Secretary Surgeon Translator Vet Waiter Welder Cashier
    Clerk Consultant Coach Detective Baker
""".split()
LANDS = """
    USA Canada UK Australia Ireland Zealand France Germany Spain Italy Portugal Norway Sweden Finland Denmark
    Poland Greece Turkey Egypt Kenya Ghana India Nepal China Japan Korea Vietnam Brazil Chile Peru Mexico Cuba
    Argentina Austria Belgium Bolivia Bulgaria Colombia Croatia Ecuador Estonia Ethiopia Hungary Iceland Indonesia
    Iran Iraq Israel Jamaica Jordan Latvia Lebanon Lithuania Malaysia Mali Malta Morocco Netherlands Nigeria Pakistan
    Panama Philippines Romania Russia Senegal Serbia Singapore Slovakia Slovenia Switzerland Taiwan Tanzania Thailand
    Tunisia Uganda Ukraine Uruguay Venezuela Zambia
""".split()
_JOB_KINDS = "Software Data Senior Junior Civil School Police Bus Truck Taxi Marine Project Sales Music".split()
_LAND_KINDS = "New South North East Costa Saint United Sri El".split()
_ONSETS = """
    b br c ch cl cr d dr f fl fr g gl gr h j k kh kl kr l m n p ph pl pr qu r s sh sk sl sm sn sp st str t th tr
    v w x y z zh b c d f g h j k l m n p r s t v w b c d f g h j k l m n p r s t v w
""".split()
_VOWELS = "a e i o u a e i o u a e i o a e i a e i a e o ai au ay ea ee ei ia ie io oa oo ou ua y é á ö ü ã ø".split()
_CODAS = (
    "b ck d ff g h k l ll lt m n n nd ng nn ns nt p r r rd rg rk rm rn rt s s sh ss st t tt tz w x z l m r n".split()
)


def word(rng: random.Random) -> str:
    """Invent a capitalised word."""
    made = rng.choice("aeiou") if rng.random() < 0.15 else ""
    for _ in range(rng.choices((1, 2, 3), (20, 58, 22))[0]):
        made += rng.choice(_ONSETS) + rng.choice(_VOWELS)
        made += rng.choice(_CODAS) if rng.random() < 0.35 else ""
    return made.capitalize()


def first_name(rng: random.Random, invented: float) -> str:
    """Draw a first name. `invented`: share of invented words."""
    if rng.random() > invented:
        return rng.choice(FIRST)
    made = word(rng)
    form = rng.random()
    if form < 0.04:
        return f"{made}-{word(rng)}"
    if form < 0.06:
        return f"{made} {rng.choice('ABCDEFGHJKLMNPRSTW')}."
    return f"{made} {word(rng)}" if form < 0.08 else made


def last_name(rng: random.Random, invented: float) -> str:
    if rng.random() > invented:
        return rng.choice(LAST)
    made = word(rng)
    form = rng.random()
    if form < 0.06:
        return rng.choice(("O'", "Mc", "Mac", "Al-", "D'")) + made
    if form < 0.09:
        return f"{rng.choice(('van', 'de', 'von', 'di', 'El', 'de la'))} {made}"
    return f"{made}-{word(rng)}" if form < 0.11 else made


def job(rng: random.Random, invented: float) -> str:
    if rng.random() < invented:
        return word(rng)
    return f"{rng.choice(_JOB_KINDS)} {rng.choice(JOBS)}" if rng.random() < 0.1 else rng.choice(JOBS)


def land(rng: random.Random, invented: float) -> str:
    if rng.random() < invented:
        return word(rng)
    return f"{rng.choice(_LAND_KINDS)} {rng.choice(LANDS)}" if rng.random() < 0.1 else rng.choice(LANDS)
